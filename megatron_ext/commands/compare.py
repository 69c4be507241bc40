"""``compare``: every schedule side by side for one pipeline, its costs and a memory cap."""

from __future__ import annotations

import argparse
import json
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from .._terminal import Progress, paint
from ..schedule import ScheduleSpec
from ..schedule.generators import GENERATORS, BrokenGenerator
from ..schedule.named import CapExceeded
from ..schedule.simulate import simulate
from ..view.table import columns
from .common import JSON, InputError, Options, Parser, memory_cap, offloads, refuse_large, writing
from .compared import asked_of, files_of, fitted, refuse_sizes
from .numbers import Shown, json_of, page_of, table_of
from .options import GROUPED, SHAPE_OF_ALL, SIZES, declare_offload
from .quality import percent, simulated
from .results import (
    cost_json,
    costs_text,
    short,
    units_text,
)


def declare(parser: Parser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="schedule files, rows beside the others; they "
        "give sizes and costs that options do not"
    )  # fmt: skip
    parser.declare("pipeline", *SIZES, SHAPE_OF_ALL)
    declare_offload(parser)
    Options(
        {"--output PAGE.html": "write the table and every timeline, fastest first, as a page"}
    ).declare(parser)
    JSON.declare(parser)
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    if args.output is not None and not args.output.endswith(".html"):
        raise InputError(f"--output {args.output}: give a name that ends in .html")
    files = files_of(args)
    refuse_sizes(args)
    cuts = _cuts(args)
    asked = asked_of(cuts[0])
    rows: list[Shown] = []
    impossible: dict[str, str] = {}
    broken: list[str] = []

    def row_of(asked: ScheduleSpec, name: str) -> Shown:
        started = time.perf_counter()
        found, over_cap = fitted(asked, name, files.get(name))
        seconds = time.perf_counter() - started
        refuse_large(found.schedule)
        before = None
        if asked.offload is not None:
            before = max(simulate(found.schedule.compute()).peak_activation)
        run, gap = simulated(found.schedule, args)
        return Shown(
            *(run, gap, seconds, offloads(args), before),
            over_cap=over_cap if asked.cap is not None else None,
        )

    with Progress("compare") as progress:
        ways = [(cut, name) for name in GENERATORS for cut in cuts]
        ways += [(args, name) for name in files]
        for number, (cut, name) in enumerate(ways):
            progress(f"{name}, {number + 1} of {len(ways)} schedules")
            try:
                rows.append(row_of(asked_of(cut), name))
            except (InputError, CapExceeded):
                raise
            except Exception as error:
                impossible[name] = str(error)
                if not isinstance(error, ValueError):
                    why = f"{type(error).__name__}: {error}"
                    impossible[name] = f"the generator of {name} ends in {why}"
                if not isinstance(error, ValueError) or isinstance(error, BrokenGenerator):
                    broken.append(impossible[name])
                continue
            run = rows[-1].run
            peak = short(max(run.peak_activation))
            text = f"{name}{units_text(run.schedule)}: bubble {percent(run.bubble)}"
            progress.line(f"{text}, peak {peak} microbatches")
    if not rows:
        name, reason = next(iter(impossible.items()))
        raise InputError(f"no schedule is possible here; {name}, for one: {reason}")
    rows.sort(key=_place)  # stable: ties stay simplest first
    if args.output is not None:
        with writing(args.output):
            Path(args.output).write_text(page_of(rows), encoding="utf-8")
    if args.json:
        print(json.dumps(_json(args, asked, rows, impossible)))
    else:
        print(_table(args, asked, rows, impossible))
    for text in broken:
        print(f"megatron-ext compare: {text}", file=sys.stderr)
    return 1 if broken else 0


def _cuts(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The options for each number of slices: here a list is rows, not one number a microbatch."""
    if args.slices is None:
        return [args]
    return [argparse.Namespace(**{**vars(args), "slices": one}) for one in args.slices.split(",")]


def _place(row: Shown) -> tuple[bool, Fraction]:
    """What fits the cap first, by time."""
    return bool(row.over_cap), row.run.makespan


def _json(
    args: argparse.Namespace, asked: ScheduleSpec, rows: list[Shown], impossible: dict[str, str]
) -> dict[str, Any]:
    """``schedules``: what fits the cap first, fastest first, fields as of ``simulate``; with a cap
    also ``over_cap``. ``slices`` of the whole are those asked for; a schedule's row has its own.

    With offload also ``peak_activation_without_offload``, of the worst rank in microbatches.
    ``memory_cap``, ``group_size`` and the offload options are there if given.
    """
    head: dict[str, Any] = {
        "pp": args.pp,
        "microbatches": args.microbatches,
        **({} if args.slices is None else {"slices": [int(n) for n in args.slices.split(",")]}),
        "cost": cost_json(asked.costs),
    }
    cap = memory_cap(args)
    if cap is not None:
        head["memory_cap"] = float(cap.share)
    for option in ("group_size", *(_OFFLOAD if offloads(args) else ())):
        if getattr(args, option) is not None:
            head[option] = getattr(args, option)
    reasons = [{"schedule": name, "reason": reason} for name, reason in impossible.items()]
    return {**head, "schedules": [json_of(row) for row in rows], "impossible": reasons}


_OFFLOAD = ("offload", "offload_time")


def _table(
    args: argparse.Namespace, asked: ScheduleSpec, rows: list[Shown], impossible: dict[str, str]
) -> str:
    cap = memory_cap(args)
    limit = "" if cap is None else f"; memory cap {short(100 * cap.share)} % of 1F1B's peak"
    if args.group_size is not None:
        limit += f"; {GROUPED} in groups of {args.group_size}"
    if args.microbatch_cost is not None:
        limit += "; a cost for every microbatch"
    if offloads(args):
        limit += f"; offload {args.offload}, {args.offload_time} of F+B+W a way"
    cells = table_of(rows)
    lines = [
        f"pp {args.pp}, microbatches {args.microbatches}; {costs_text(asked.costs)}{limit}",
        "",
    ]
    for number, line in enumerate(columns(cells)):
        over = number > 0 and rows[number - 1].over_cap
        text = f"{line}  over the cap" if over else line
        best = number == 1 and not over
        lines.append(paint(f"{text}  best", "1;32") if best else text)
    lines += [
        "",
        "above bound: the makespan over the least of any order at that placement and memory; "
        "a longer search gains at most that",
        "peak: activations on the worst rank, in microbatches, and as a share of the number of "
        "ranks, which is 1F1B's peak where a step has as many microbatches or more",
    ]
    if asked.costs.exchange:
        lines.append("hidden: of the exchange behind computation")
    if args.reorder_microbatches:
        lines.append("by order: what the order of the microbatches saves of the time as given")
        lines += [f"  best, microbatches {rows[0].run.schedule.arrangement}"]
    if offloads(args):
        lines += [
            "without: the same without offload; host peak: likewise, on the host",
            "offloaded: activation sets, of all ranks; stall: the makespan's part of it",
        ]
    if impossible:
        lines += ["not possible here:"]
        lines += [
            f"  {reason}" if reason.startswith(name) else f"  {name}: {reason}"
            for name, reason in impossible.items()
        ]
    return "\n".join(lines)
