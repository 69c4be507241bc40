"""``show``: the timeline with the memory curve, as text or picture."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..schedule.simulate import simulate
from ..view import page, recorded, svg, text, timeline, trace
from .common import (
    InputError,
    Parser,
    add_schedule_options,
    output,
    positive,
    schedule_of,
    user_input,
)


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("show", help="timeline with the memory curve, as text or picture")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a schedule file, or --schedule")
    add_schedule_options(parser, required=False)
    parser.add_argument(
        "--output",
        metavar="PATH",
        help=f"write {', '.join(_RENDERERS)} (.json: Chrome trace for ui.perfetto.dev); "
        "default: text on the terminal",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="COLUMNS",
        help="of the text; 0: no wrapping (default: the terminal's, 0 where there is none)",
    )
    parser.add_argument(
        "--measured",
        metavar="DIR",
        help="draw the run that --pp-trace DIR recorded under the planned one",
    )
    parser.add_argument(
        "--iteration", type=positive, metavar="N", help="of --measured; default: the last"
    )
    parser.set_defaults(run=_show_timeline)


# Each draws one run, or the planned and the measured one.
_RENDERERS: dict[str, Callable[[Sequence[timeline.Timeline]], str]] = {
    ".svg": lambda runs: svg.render(*runs),
    ".html": lambda runs: page.render(*runs),
    ".json": lambda runs: json.dumps(trace.to_trace(list(runs))) + "\n",
    ".txt": lambda runs: "\n".join(text.render(run) for run in runs),
}


def _show_timeline(args: argparse.Namespace) -> None:
    if (args.file is None) == (args.schedule is None):
        raise InputError("give either a schedule file or --schedule NAME, one of the two")
    suffix = Path(args.output).suffix if args.output else None
    if suffix is not None and suffix not in _RENDERERS:
        raise InputError(
            f"--output {args.output}: the suffix says the format; use {', '.join(_RENDERERS)}"
        )
    schedule = schedule_of(args, args.file)
    runs = [timeline.planned(simulate(schedule))]
    if args.measured is not None:
        with user_input():
            runs.append(recorded.load(args.measured, schedule, args.iteration))
    elif args.iteration is not None:
        raise InputError("--iteration says which one of --measured DIR; give both")
    if suffix is None:
        width = _terminal_width(args.width)
        print("\n".join(text.render(run, width) for run in runs), end="")
        return
    with output(args.output):
        Path(args.output).write_text(_RENDERERS[suffix](runs), encoding="utf-8")
    print(
        f"{args.output}: {schedule.name}, pp {schedule.pp}, "
        f"makespan {timeline.decimal(runs[0].makespan)}"
    )


def _terminal_width(asked: int | None) -> int:
    if asked is not None:
        return max(asked, 0)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
