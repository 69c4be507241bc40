"""``schedule``: write a schedule file."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..schedule import save
from .common import (
    JSON,
    InputError,
    Options,
    Parser,
    hint,
    offloads,
    schedule_of,
    writing,
)
from .numbers import Shown, json_of
from .options import declare_schedule
from .quality import simulated


def declare(parser: Parser) -> None:
    declare_schedule(parser)
    _OWN.declare(parser)
    parser.set_defaults(run=_write_schedule)


_OWN = Options(
    {
        "--output FILE": "FILE.json",
        **JSON.help,
    },
)


def _write_schedule(args: argparse.Namespace) -> None:
    missing = [f"--{one}" for one in ("schedule", "output") if getattr(args, one) is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)}")
    started = time.perf_counter()
    with Progress("schedule") as progress:
        progress(f"making {args.schedule}")
        schedule = schedule_of(args).unlowered()
    taken = time.perf_counter() - started
    with writing(args.output):
        save(schedule, args.output)
    if args.json:
        simulation, gap = simulated(schedule, args)
        shown = Shown(simulation, gap, taken, offloads(args))
        print(json.dumps({**json_of(shown), "output": args.output}))
        return
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")
    order = "" if schedule.arrangement is None else f"microbatches {schedule.arrangement}"
    for note in (schedule.note, order, hint(args)):
        if note:
            print(f"  {note}")
