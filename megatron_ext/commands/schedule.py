"""``schedule``: write a schedule file."""

from __future__ import annotations

import argparse

from ..schedule.lower import lower
from .common import Parser, add_schedule_options, output, schedule_of


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("schedule", help="write a schedule file")
    add_schedule_options(parser)
    parser.add_argument("--output", required=True, metavar="FILE.json")
    parser.add_argument(
        "--lowered", action="store_true", help="with the transfers between ranks too"
    )
    parser.set_defaults(run=_write_schedule)


def _write_schedule(args: argparse.Namespace) -> None:
    schedule = schedule_of(args).compute()
    if args.lowered:
        schedule = lower(schedule)
    with output(args.output):
        schedule.save(args.output)
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")
