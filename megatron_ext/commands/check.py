"""``check``: prove that a schedule file can be executed."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction

from ..schedule import ScheduleError
from ..schedule.passes.lower import lower
from .common import Parser, load, user_input, verify
from .results import per_rank, units_text


def declare(parser: Parser) -> None:
    parser.description = (
        "Exit status 1, with the first fault on stderr, if it cannot be executed; 2 if it cannot "
        "be read."
    )
    parser.add_argument(
        "file", metavar="FILE", help="schedule file, .json or .csv; - is standard input"
    )
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    schedule = load(args.file)
    with user_input(args.file):
        try:
            report = verify(schedule)
        except ScheduleError as error:
            print(f"megatron-ext check: {args.file}: {error}", file=sys.stderr)
            return 1
    actions = sum(len(row) for row in schedule.ranks)
    kind = ", forward only" if schedule.is_forward_only else ""
    lines = [
        f"{args.file}: {schedule.name}, pp {schedule.pp}, chunks {schedule.chunks}, "
        f"microbatches {schedule.microbatches}{units_text(schedule)}, {actions} actions{kind}: ok",
        "  every pass once, on the rank of its stage, in microbatch order, after what it needs",
    ]
    if schedule.is_lowered:
        lines.append(
            "  the file's transfers: complete, in matching order, no deadlock with blocking sends"
        )
    else:
        lowered = lower(schedule)
        verify(lowered)  # what lower() makes of a valid order is ours: a fault here is a bug
        transfers = sum(action.op.is_send for *_, action in lowered.actions())
        lines.append(
            f"  compute only; lowered to {transfers} transfers: complete, in matching "
            "order, no deadlock with blocking sends"
        )
    if report.offloaded_sets:
        host = [Fraction(n, schedule.chunks) for n in report.peak_host_sets]
        lines.append(
            f"  {sum(report.offloaded_sets)} activation sets offloaded: each is copied out and "
            "back between its F and its B, and no link carries two copies at once"
        )
        lines.append(f"  host peak per rank, in microbatches: {per_rank(host)}")
    lines.append(f"  peak activation per rank, in microbatches: {per_rank(report.peak_activation)}")
    print("\n".join(lines))
    return 0
