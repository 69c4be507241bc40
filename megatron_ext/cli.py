"""Command line: ``megatron-ext`` or ``python -m megatron_ext``.

Runs on a bare interpreter. A command is a function that adds its parser and sets ``run``; add one
to ``_COMMANDS``. Bad input ends in one sentence on stderr and exit status 2; any other exception
is a bug and stays a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .schedule.actions import Op
from .schedule.check import CheckReport, check
from .schedule.costs import Costs, number_to_json
from .schedule.generators import NAMES, generate
from .schedule.lower import lower
from .schedule.schedule import Schedule
from .schedule.simulate import Simulation, simulate
from .view import recorded, svg, text, timeline, trace


class InputError(Exception):
    """What the user gave cannot be used; the text is the whole message."""


@contextmanager
def _user_input(path: str | None = None) -> Iterator[None]:
    """Around whatever judges the user's input, or a file's: its errors are messages."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from None


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, and options cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _positive(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {value!r}")
    return number


# Which schedule: options shared by the commands that make or read one.


def _add_schedule_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--schedule",
        required=required,
        metavar="NAME|FILE",
        help=f"{', '.join(NAMES)}, or a schedule file",
    )
    group.add_argument("--pp", type=_positive, metavar="P", help="pipeline ranks")
    group.add_argument("--microbatches", type=_positive, metavar="M", help="of one iteration")
    group.add_argument("--chunks", type=_positive, metavar="V", help="model chunks per rank")
    group.add_argument(
        "--cost", metavar="F,B,W[,HOP]", help="times per rank and microbatch (default 1,1,1,0)"
    )
    group.add_argument("--hop", metavar="T", help="latency of one transfer between ranks")
    group.add_argument(
        "--stage-cost", metavar="FILE", help='JSON {"stages": [[F, B, W], ...]}, one row a stage'
    )


def _is_file(name: str) -> bool:
    return name not in NAMES and (name.endswith(".json") or os.sep in name or Path(name).is_file())


def _costs(args: argparse.Namespace, base: Costs) -> Costs:
    """``base`` with what the options say in its place."""
    with _user_input():
        if args.cost is not None:
            base = Costs.parse(args.cost, args.hop)
        elif args.hop is not None:
            base = Costs.of(
                base.forward, base.backward_input, base.backward_weight, args.hop, base.stages
            )
        return base if args.stage_cost is None else base.with_stage_file(args.stage_cost)


def _load(path: str) -> Schedule:
    with _user_input():
        return Schedule.load(path)


def _verify(schedule: Schedule) -> CheckReport:
    """``check`` of what a file holds; one without a single backward pass is for evaluation."""
    schedule.costs.durations(schedule.placement)  # per-stage costs must fit the number of stages
    return check(schedule, forward_only=_is_forward_only(schedule))


def _is_forward_only(schedule: Schedule) -> bool:
    return all(action.op is Op.F for _, _, action in schedule.compute().actions())


def _schedule(args: argparse.Namespace, file: str | None = None) -> Schedule:
    """The schedule in ``file``, or else the one that ``--schedule`` and its options name."""
    if file is None and _is_file(args.schedule):
        file = args.schedule
    schedule = _generated(args) if file is None else _from_file(file, args)
    costs = schedule.costs
    if max(costs.hop, *costs.per_rank_work(schedule.placement)) > _LARGEST_COST:
        raise InputError(
            f"F+B+W of a microbatch and the hop must not exceed {_LARGEST_COST:.0e}; "
            "give the costs in another unit"
        )
    return schedule


_LARGEST_COST = 10**12  # beyond, times no longer fit the floats that they are printed as


def _generated(args: argparse.Namespace) -> Schedule:
    if args.schedule not in NAMES:
        raise InputError(
            f"unknown schedule {args.schedule!r}; give one of {', '.join(NAMES)}, or a file"
        )
    missing = [f"--{o}" for o in ("pp", "microbatches") if getattr(args, o) is None]
    if missing:
        raise InputError(f"--schedule {args.schedule} needs {' and '.join(missing)} too")
    costs = _costs(args, Costs())
    with _user_input():
        return generate(args.schedule, args.pp, args.microbatches, args.chunks, costs)


def _from_file(path: str, args: argparse.Namespace) -> Schedule:
    """A valid schedule read from a file, with the file's costs unless options give others."""
    schedule = _load(path)
    for option in ("pp", "microbatches", "chunks"):
        given, holds = getattr(args, option), getattr(schedule, option)
        if given not in (None, holds):
            raise InputError(
                f"--{option} {given} contradicts {path}, which is for {option}={holds}; "
                f"leave --{option} out"
            )
    schedule = replace(schedule, costs=_costs(args, schedule.costs))
    with _user_input(path):
        _verify(schedule)
    return schedule


# simulate


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "simulate", help="bubble, makespan and peak activation of a schedule"
    )
    _add_schedule_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    schedule = _schedule(args)
    seconds = time.perf_counter() - started
    simulation = simulate(schedule)
    if args.json:
        print(json.dumps(_simulation_json(simulation, seconds)))
    else:
        print(_simulation_table(simulation, seconds), end="")


def _simulation_json(simulation: Simulation, seconds: float) -> dict[str, Any]:
    """The contract's object. ``generation_seconds`` is the reading and checking of a file."""
    schedule = simulation.schedule
    peaks = simulation.peak_activation
    cost = schedule.costs.to_json()
    cost.pop("stages", None)
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "cost": cost,
        "makespan": number_to_json(simulation.makespan),
        "bubble": number_to_json(simulation.bubble),
        "span_bubble": number_to_json(simulation.span_bubble),
        "peak_activation": [number_to_json(peak) for peak in peaks],
        "peak_activation_vs_1f1b": number_to_json(max(peaks) / schedule.pp),
        "generation_seconds": round(seconds, 6),
    }


def _simulation_table(simulation: Simulation, seconds: float) -> str:
    schedule, costs = simulation.schedule, simulation.schedule.costs
    peaks = simulation.peak_activation
    times = (
        "per stage"
        if costs.stages
        else (
            f"F {_show(costs.forward)}, B {_show(costs.backward_input)}, "
            f"W {_show(costs.backward_weight)}"
        )
    )
    return "\n".join(
        [
            f"{schedule.name}: pp {schedule.pp}, chunks {schedule.chunks}, "
            f"microbatches {schedule.microbatches}; costs {times}, hop {_show(costs.hop)}",
            f"  makespan         {_show(simulation.makespan)}",
            f"  bubble           {_show(100 * simulation.bubble)} %",
            f"  span bubble      {_show(100 * simulation.span_bubble)} %",
            f"  peak activation  {_show(max(peaks))} microbatches, "
            f"{_show(100 * max(peaks) / schedule.pp)} % of 1F1B's {schedule.pp}",
            f"    per rank       {_per_rank(peaks)}",
            f"  generated in     {seconds:.3f} s\n",
        ]
    )


def _show(value: Fraction) -> str:
    return timeline.decimal(float(value))


def _per_rank(values: Sequence[Fraction]) -> str:
    return " ".join(_show(value) for value in values)


# schedule


def _add_schedule(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("schedule", help="write a schedule file")
    _add_schedule_options(parser)
    parser.add_argument("--output", required=True, metavar="FILE.json")
    parser.add_argument(
        "--lowered", action="store_true", help="with the transfers between ranks too"
    )
    parser.set_defaults(run=_write_schedule)


def _write_schedule(args: argparse.Namespace) -> None:
    schedule = _schedule(args).compute()
    if args.lowered:
        schedule = lower(schedule)
    with _output(args.output):
        schedule.save(args.output)
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")


@contextmanager
def _output(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


# check


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("check", help="prove that a schedule file can be executed")
    parser.add_argument("file", metavar="FILE")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> None:
    schedule = _load(args.file)
    with _user_input(args.file):
        report = _verify(schedule)
    actions = sum(len(row) for row in schedule.ranks)
    kind = ", forward only" if _is_forward_only(schedule) else ""
    lines = [
        f"{args.file}: {schedule.name}, pp {schedule.pp}, chunks {schedule.chunks}, "
        f"microbatches {schedule.microbatches}, {actions} actions{kind}: ok",
        "  every pass once, on the rank of its stage, in microbatch order, after what it needs",
    ]
    if schedule.is_lowered:
        lines.append(
            "  the file's transfers: complete, in matching order, no deadlock with blocking sends"
        )
    else:
        lowered = lower(schedule)
        _verify(lowered)  # what lower() makes of a valid order is ours: a fault here is a bug
        transfers = (sum(len(row) for row in lowered.ranks) - actions) // 2
        lines.append(
            f"  compute only; lowered to {transfers} transfers: complete, in matching "
            "order, no deadlock with blocking sends"
        )
    lines.append(
        f"  peak activation per rank, in microbatches: {_per_rank(report.peak_activation)}"
    )
    print("\n".join(lines))


# show


def _add_show(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("show", help="timeline with the memory curve, as text or picture")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a schedule file, or --schedule")
    _add_schedule_options(parser, required=False)
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
        "--iteration", type=_positive, metavar="N", help="of --measured; default: the last"
    )
    parser.set_defaults(run=_show_timeline)


# Each draws one run, or the planned and the measured one.
_RENDERERS: dict[str, Callable[[Sequence[timeline.Timeline]], str]] = {
    ".svg": lambda runs: svg.render(*runs),
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
    schedule = _schedule(args, args.file)
    runs = [timeline.planned(simulate(schedule))]
    if args.measured is not None:
        with _user_input():
            runs.append(recorded.load(args.measured, schedule, args.iteration))
    elif args.iteration is not None:
        raise InputError("--iteration says which one of --measured DIR; give both")
    if suffix is None:
        width = _terminal_width(args.width)
        print("\n".join(text.render(run, width) for run in runs), end="")
        return
    with _output(args.output):
        Path(args.output).write_text(_RENDERERS[suffix](runs), encoding="utf-8")
    print(
        f"{args.output}: {schedule.name}, pp {schedule.pp}, "
        f"makespan {timeline.decimal(runs[0].makespan)}"
    )


def _terminal_width(asked: int | None) -> int:
    if asked is not None:
        return max(asked, 0)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


_COMMANDS = (_add_simulate, _add_schedule, _add_check, _add_show)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` as in ``sys.argv[1:]``. Returns the exit status."""
    parser = _Parser(prog="megatron-ext", description="Pipeline schedules for stock Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add in _COMMANDS:
        add(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except InputError as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again at exit, when it
        # flushes stdout; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what the shell reports for a process that SIGPIPE ended
    return 0
