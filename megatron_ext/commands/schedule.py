"""``schedule``: write a schedule file."""

from __future__ import annotations

import argparse

from ..schedule.io import is_csv, save
from ..schedule.passes.lower import lower
from .blocks import add_block_option, block_schedule
from .common import InputError, Parser, add_schedule_options, offloads, output, schedule_of


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("schedule", help="write a schedule file")
    add_schedule_options(parser, required=False)
    add_block_option(parser, "the schedule of a building block, squeezed and reordered")
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="FILE.json, or FILE.csv for torch.distributed.pipelining's form, compute actions "
        "without costs",
    )
    parser.add_argument(
        "--lowered",
        action="store_true",
        help="with the transfers between ranks, and to the host, too",
    )
    parser.set_defaults(run=_write_schedule)


def _write_schedule(args: argparse.Namespace) -> None:
    if offloads(args) and not args.lowered:
        raise InputError(
            f"--offload {args.offload} needs --lowered too: without it the file holds compute "
            "actions only"
        )
    if (args.schedule is None) == (args.block is None):
        raise InputError("give either --schedule NAME or --block NAME, or a file of either")
    schedule = schedule_of(args) if args.block is None else block_schedule(args)
    if args.lowered:
        if is_csv(args.output):
            raise InputError(
                f"--output {args.output}: torch's CSV compute form has no transfers; "
                "leave --lowered out, or write a .json"
            )
        schedule = lower(schedule)
    else:
        schedule = schedule.compute()
    with output(args.output):
        save(schedule, args.output)
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")
    if schedule.note:
        print(f"  {schedule.note}")
