"""``show``: the timeline with the memory curve, as text or picture."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..schedule import NAMES, Schedule, simulate
from ..schedule.generators.made import generated_by
from ..view import recorded, text, timeline
from ..view.formats import RENDERERS
from .common import (
    InputError,
    Options,
    Parser,
    positive,
    schedule_of,
    user_input,
    writing,
)
from .compared import asked_of, fitted
from .options import declare_schedule


def declare(parser: Parser) -> None:
    parser.add_argument(
        "schedules",
        nargs="*",
        metavar="NAME|FILE",
        help="schedules to draw one above the other on one time axis; or --schedule",
    )
    declare_schedule(parser)
    _DRAWN.declare(parser)
    parser.set_defaults(run=_show_timeline)


_DRAWN = Options(
    {
        "--output PATH": f"write {', '.join(RENDERERS)} (.json: Chrome trace for ui.perfetto.dev); "
        "default: text on the terminal",
        "--measured DIR": "draw the run that --pp-trace DIR recorded below its plan (or the named "
        "schedule)",
        "--iteration N": "iteration of --measured (default: the last)",
    },
    kinds={"--iteration": positive},
)


def _show_timeline(args: argparse.Namespace) -> None:
    if args.schedules and args.schedule is not None:
        raise InputError("give either schedules or --schedule NAME")
    if not args.schedules and args.schedule is None and args.measured is None:
        raise InputError("give schedules, --schedule NAME or --measured DIR")
    _draw(args)


def _draw(args: argparse.Namespace) -> None:
    """Print the runs, or write them to ``--output``."""
    suffix = Path(args.output).suffix if args.output else None
    if suffix is not None and suffix not in RENDERERS:
        raise InputError(
            f"--output {args.output}: the suffix gives the format; use {', '.join(RENDERERS)}"
        )
    runs = _runs(args)
    if suffix is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print("\n".join(text.render(run, width) for run in runs), end="")
        _print_measured(runs)
        return
    text_of = RENDERERS[suffix](runs)
    with writing(args.output):
        Path(args.output).write_text(text_of, encoding="utf-8")
    plans = [run for run in runs if run.label != "measured"]
    about = [f"{run.schedule.name}, pp {run.schedule.pp}" for run in plans]
    spans = [f"makespan {timeline.decimal(run.makespan)}" for run in plans]
    print(f"{args.output}: {'; '.join(map(', '.join, zip(about, spans)))}")
    _print_measured(runs)


def _print_measured(runs: Sequence[timeline.Timeline]) -> None:
    """The times of a measured run and of its plan."""
    if runs[-1].label != "measured":
        return
    planned, measured = runs
    plan = planned.scaled_to(measured)
    print(
        f"measured {measured.makespan_text}, bubble {100 * measured.bubble:.1f} %; planned "
        f"{plan.makespan_text}, bubble {100 * plan.bubble:.1f} %"
    )


def _runs(args: argparse.Namespace) -> list[timeline.Timeline]:
    """The planned run of a schedule, and the measured one if there is one."""
    if not args.schedules and args.schedule is None:
        with user_input():
            schedules = [recorded.plan_of(args.measured, args.iteration)]
    else:
        schedules = _schedules(args)
    runs = []
    for schedule in schedules:
        with generated_by(schedule.name):
            runs.append(timeline.planned(simulate(schedule)))
    if args.measured is not None:
        if len(runs) > 1:
            raise InputError(f"--measured {args.measured} is drawn under one schedule; give one")
        with user_input():
            runs.append(recorded.load(args.measured, schedules[0], args.iteration))
    return runs


def _schedules(args: argparse.Namespace) -> list[Schedule]:
    """What is drawn. Each of several takes the options that are for it, as in ``compare``."""
    names = args.schedules or [args.schedule]
    found = []
    for name in names:
        mine = argparse.Namespace(**{**vars(args), "schedule": name})
        if len(names) == 1 or name not in NAMES:
            found.append(schedule_of(mine))
            continue
        if args.pp is None or args.microbatches is None:
            raise InputError(f"{name} needs --pp and --microbatches too")
        with user_input():
            found.append(fitted(asked_of(mine), name)[0].schedule)
    return found
