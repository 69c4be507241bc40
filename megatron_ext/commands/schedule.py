"""``schedule``: write a schedule file."""

from __future__ import annotations

import argparse
import json
import time
from fractions import Fraction
from typing import Any

from .._terminal import Progress
from ..schedule import AUTO, GENERATORS, Schedule, lower, save
from ..schedule.costs import number_to_json
from ..schedule.generators import steadier
from ..schedule.memory_cap import ShareCap
from ..schedule.optimize import Optimized, optimize
from ..schedule.optimize_window import import_solver
from .blocks import block_schedule
from .common import (
    JSON,
    InputError,
    Options,
    Parser,
    hint,
    memory_cap,
    offload_of,
    offloads,
    output,
    schedule_of,
    user_input,
)
from .numbers import Shown, json_of, short
from .options import JITTER, block, declare_schedule, seconds
from .quality import jitter_of, simulated


def declare(parser: Parser) -> None:
    declare_schedule(parser)
    parser.declare("robustness", JITTER)
    block("the schedule of a building block, squeezed and reordered").declare(parser)
    _OWN.declare(parser)
    parser.set_defaults(run=_write_schedule)


_OWN = Options(
    {
        "--output FILE": "FILE.json, or FILE.csv for torch.distributed.pipelining's form (compute "
        "actions, no costs)",
        "--lowered": "include the transfers between ranks and to the host",
        "--optimize SECONDS": "shorten the order by constraint programming for SECONDS, within "
        "the memory cap or the schedule's own peak, with --offload too; needs the extra [optimize]",
        **JSON.help,
    },
    kinds={"--optimize": seconds},
    required=("--output",),
)


def _write_schedule(args: argparse.Namespace) -> None:
    if offloads(args) and not args.lowered:
        raise InputError(
            f"--offload {args.offload} needs --lowered too: without it the file holds compute "
            "actions only"
        )
    if not args.output.endswith((".json", ".csv")):
        raise InputError(f"--output {args.output}: the suffix gives the form; use .json or .csv")
    if args.lowered and args.output.endswith(".csv"):
        raise InputError(
            f"--output {args.output}: torch's CSV compute form has no transfers; "
            "leave --lowered out, or write a .json"
        )
    if (args.schedule is None) == (args.block is None):
        raise InputError("give either --schedule NAME or --block NAME, or a file of either")
    noise = jitter_of(args)
    started = time.perf_counter()
    if args.optimize is not None:
        with user_input():
            import_solver()  # before a schedule is made, which may take long
    optimized = None
    with Progress("schedule") as progress:
        progress(f"making {args.schedule or args.block}")
        schedule = schedule_of(args) if args.block is None else block_schedule(args)
        if args.optimize is not None:
            progress(f"optimizing {schedule.name} for {args.optimize:g} s")
            optimized = _optimized(args, schedule)
            schedule = optimized.schedule
        before = schedule
        if noise is not None and args.objective in (None, "makespan"):
            progress(f"comparing orders of {schedule.name} under jitter")
            schedule = steadier(schedule, noise.spread, args.effort)
        mean = None if noise is None or schedule is before else noise.of(before, None).mean
        schedule = lower(schedule) if args.lowered else schedule.compute()
    taken = time.perf_counter() - started
    with output(args.output) as path:
        save(schedule, path)
    if args.json:
        simulation, quality = simulated(schedule, args, None, noise)
        data = json_of(Shown(simulation, quality, taken, offloads(args)))
        data |= {"output": args.output, **_optimized_json(optimized)}
        if mean is not None:
            after = data["makespan_quantiles"]["mean"]
            data["steadier"] = {"before": float(mean), "after": after}
        print(json.dumps(data))
        return
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")
    order = "" if schedule.arrangement is None else f"microbatches {schedule.arrangement}"
    for note in (schedule.note, order, hint(args)):
        if note:
            print(f"  {note}")
    if optimized is not None:
        _print_optimized(optimized)
    if noise is not None:
        found = "no steadier order found" if mean is None else f"mean {short(mean)} before"
        print(f"  jitter: {found}; {noise.text(noise.of(schedule, None))}")


def _optimized(args: argparse.Namespace, schedule: Schedule) -> Optimized:
    """``schedule`` optimized within the cap that the options give, or else its own peak."""
    cap = memory_cap(args)
    made = GENERATORS.get(args.schedule)
    if cap is None and (args.schedule == AUTO or (made is not None and made.takes_memory_cap)):
        cap = ShareCap(Fraction(1))  # their default
    sets = None if cap is None else cap.sets(schedule.placement, schedule.splits_backward)
    away = offload_of(args, schedule.pp) if offloads(args) else None
    with user_input():
        return optimize(schedule, args.optimize, sets, args.objective or "makespan", away=away)


def _print_optimized(made: Optimized) -> None:
    print(
        f"  {made.objective} {short(made.before)} before, {short(made.after)} optimized "
        f"({100 * float(made.after / made.before - 1):+.2f} %), at most {made.cap} activation "
        f"sets a rank"
    )
    if made.gap:
        gap = 100 * float(made.gap)
        print(
            f"  lower bound {short(made.bound)}: the result is at most {gap:.2f} % above the best"
        )
    else:
        print("  no order of this placement and memory is faster")
    if not made.complete:
        print("  ended by the clock: another run or machine may give another order")


def _optimized_json(made: Optimized | None) -> dict[str, Any]:
    if made is None:
        return {}
    return {
        "optimized": {
            "objective": made.objective,
            "before": number_to_json(made.before),
            "after": number_to_json(made.after),
            "lower_bound": number_to_json(made.bound),
            "above_bound": number_to_json(made.gap),
            "cap_sets": made.cap,
            "deterministic": made.complete,
        }
    }
