"""``simulate``: bubble, makespan and peak activation of a schedule; the first fault of a file."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from .common import InputError, hint, offloads, schedule_of
from .numbers import Shown, json_of, lines_of
from .options import declare_schedule
from .parser import JSON, Parser
from .quality import simulated
from .results import costs_text, units_text


def declare(parser: Parser) -> None:
    parser.description = "Exit status 1, with the first fault, for a file that cannot be executed."
    declare_schedule(parser)
    JSON.declare(parser)
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    if args.schedule is None:
        raise InputError("the following arguments are required: --schedule")
    started = time.perf_counter()
    with Progress("simulate") as progress:
        progress(f"making {args.schedule}")
        schedule = schedule_of(args)
        seconds = time.perf_counter() - started
        progress(f"simulating {schedule.name}")
        simulation, gap = simulated(schedule, args)
    shown = Shown(simulation, gap, seconds, offloads(args))
    if args.json:
        print(json.dumps(json_of(shown)))
    else:
        print(_text(shown))
        if hint(args):
            print(f"  note             {hint(args)}")


def _text(shown: Shown) -> str:
    schedule = shown.run.schedule
    why = "note" if shown.run.transfers else "chosen because"
    return "\n".join(
        [
            f"{schedule.name}: pp {schedule.pp}, chunks {schedule.chunks}, "
            f"microbatches {schedule.microbatches}{units_text(schedule)}; "
            f"{costs_text(schedule.costs)}",
            *lines_of(shown),
            *([f"  {why:<17}{schedule.note}"] if schedule.note else []),
        ]
    )
