"""``show``: the timeline with the memory curve, as text or picture."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..schedule import NAMES, Costs, Schedule, simulate
from ..schedule.generators.building_block import Block
from ..schedule.generators.made import generated_by
from ..view import deviations, recorded, text, timeline
from ..view.formats import RENDERERS, THEMES
from .blocks import (
    OF_BLOCKS,
    add_block_option,
    block_json,
    block_name,
    block_numbers,
    block_of,
    block_text,
    print_blocks,
)
from .common import (
    InputError,
    Parser,
    add_schedule_options,
    output,
    positive,
    refuse_others,
    schedule_of,
    user_input,
)
from .compared import asked_of, fitted


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("show", help="draw a timeline with its memory, as text or picture")
    parser.add_argument(
        "schedules",
        nargs="*",
        metavar="NAME|FILE",
        help="schedules to draw one above the other on one time axis; or --schedule",
    )
    add_schedule_options(parser, required=False)
    block = parser.add_argument_group("building block, in place of a schedule")
    add_block_option(
        block,
        "draw the block that a schedule is made of, at equal costs, for --microbatches (default 1) "
        "as it repeats, with its lifespans and memory",
    )
    block.add_argument(
        "--blocks", action="store_true", help="print all blocks side by side, for --pp ranks"
    )
    block.add_argument(
        "--json",
        action="store_true",
        help="print --block (readable as a block file) or --blocks as JSON",
    )
    block.add_argument(
        "--squeeze",
        action="store_true",
        help="remove idle time but keep the order; --schedule also reorders",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help=f"write {', '.join(RENDERERS)} (.json: Chrome trace for ui.perfetto.dev); "
        "default: text on the terminal",
    )
    parser.add_argument(
        "--theme",
        choices=THEMES,
        default="auto",
        help="colours of an .svg: as the reader's system (auto, the default), or fixed",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="COLUMNS",
        help="width of the text; 0: no wrapping (default: the terminal's, else 0)",
    )
    parser.add_argument(
        "--measured",
        metavar="DIR",
        help="draw the run that --pp-trace DIR recorded below its plan (or the named schedule), "
        "and name its three longest unplanned waits",
    )
    parser.add_argument(
        "--iteration",
        type=positive,
        metavar="N",
        help="iteration of --measured (default: the last)",
    )
    parser.set_defaults(run=_show_timeline)


def _show_timeline(args: argparse.Namespace) -> None:
    given = 2 - [args.schedule, args.block].count(None) + bool(args.schedules) + args.blocks
    if given > 1 or (not given and args.measured is None):
        raise InputError(
            "give either schedules or --schedule NAME or --block NAME or --blocks, one of them, or "
            "--measured DIR alone"
        )
    if args.blocks:
        refuse_others(args, "--blocks", ("blocks", *OF_BLOCKS))
        print_blocks(args)
    elif args.block is not None:
        _show_block(args)
    elif args.json:
        raise InputError("--json is for --block and --blocks; simulate --json has a schedule's")
    else:
        _draw(args, lambda: _runs(args))


def _show_block(args: argparse.Namespace) -> None:
    """A block's picture and numbers."""
    taken = (*OF_BLOCKS, "squeeze", "output", "width", "theme")
    refuse_others(args, f"--block {args.block}", taken)
    if args.json:
        refuse_others(args, "--json", OF_BLOCKS)
    block, microbatches = block_of(args)
    found = block_numbers(block, args.block, microbatches)
    if args.json:
        print(block_json(args.block, found))
        return
    _draw(args, lambda: [_block(args, block)])
    print("\n" + block_text(found))


def _draw(args: argparse.Namespace, runs_of: Callable[[], list[timeline.Timeline]]) -> None:
    """Print the runs, or write them to ``--output``."""
    suffix = Path(args.output).suffix if args.output else None
    if suffix is not None and suffix not in RENDERERS:
        raise InputError(
            f"--output {args.output}: the suffix gives the format; use {', '.join(RENDERERS)}"
        )
    if suffix is None and args.theme != "auto":
        raise InputError(f"--theme {args.theme} is for an --output FILE.svg; give both")
    if suffix is not None and args.width is not None:
        raise InputError(f"--width {args.width} is for text; leave it or --output out")
    runs = runs_of()
    if suffix is None:
        width = _terminal_width(args.width)
        print("\n".join(text.render(run, width) for run in runs), end="")
        _print_deviations(runs)
        return
    text_of = RENDERERS[suffix](runs, args.theme)
    with output(args.output) as path:
        Path(path).write_text(text_of, encoding="utf-8")
    plans = [run for run in runs if run.label != "measured"]
    about = [f"{run.schedule.name}, pp {run.schedule.pp}" for run in plans]
    spans = [f"makespan {timeline.decimal(run.makespan)}" for run in plans]
    print(f"{args.output}: {'; '.join(map(', '.join, zip(about, spans)))}")
    _print_deviations(runs)


def _print_deviations(runs: Sequence[timeline.Timeline]) -> None:
    """Where a measured run waits most against the plan."""
    if runs[-1].label != "measured":
        return
    planned, measured = runs
    plan = planned.scaled_to(measured)
    print(
        f"measured {measured.makespan_text}, bubble {100 * measured.bubble:.1f} %; planned "
        f"{plan.makespan_text}, bubble {100 * plan.bubble:.1f} %"
    )
    found = deviations.largest(planned, measured)
    lines = [one.text(measured.unit) for one in found]
    print("\n".join(lines or ["no pass waits longer than planned"]))


def _runs(args: argparse.Namespace) -> list[timeline.Timeline]:
    """The planned run of a schedule, and the measured one if there is one."""
    if args.squeeze:
        raise InputError("--squeeze is for --block NAME; a schedule is squeezed already")
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
    elif args.iteration is not None:
        raise InputError("--iteration selects one of --measured DIR; give both")
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


def _block(args: argparse.Namespace, block: Block) -> timeline.Timeline:
    """A building block repeated, or squeezed too. A pass takes 1 in both."""
    name, microbatches = block_name(args.block), args.microbatches or 1
    if not args.squeeze:
        return timeline.stamped(block, name, microbatches)
    ranks = tuple(tuple(row) for row in block.stamp(microbatches))
    whole = Costs.of(*(block.placement.chunks,) * 3)  # a pass of one chunk takes 1
    name += ", squeezed"
    return timeline.planned(simulate(Schedule(name, block.placement, microbatches, ranks, whole)))


def _terminal_width(asked: int | None) -> int:
    if asked is not None:
        return max(asked, 0)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
