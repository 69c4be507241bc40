"""``simulate``: bubble, makespan and peak activation of a schedule."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ..schedule.costs import number_to_json
from ..schedule.simulate import Simulation, simulate
from .common import Parser, add_schedule_options, per_rank, schedule_of, short


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "simulate", help="bubble, makespan and peak activation of a schedule"
    )
    add_schedule_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    schedule = schedule_of(args)
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
            f"F {short(costs.forward)}, B {short(costs.backward_input)}, "
            f"W {short(costs.backward_weight)}"
        )
    )
    return "\n".join(
        [
            f"{schedule.name}: pp {schedule.pp}, chunks {schedule.chunks}, "
            f"microbatches {schedule.microbatches}; costs {times}, hop {short(costs.hop)}",
            f"  makespan         {short(simulation.makespan)}",
            f"  bubble           {short(100 * simulation.bubble)} %",
            f"  span bubble      {short(100 * simulation.span_bubble)} %",
            f"  peak activation  {short(max(peaks))} microbatches, "
            f"{short(100 * max(peaks) / schedule.pp)} % of 1F1B's {schedule.pp}",
            f"    per rank       {per_rank(peaks)}",
            f"  generated in     {seconds:.3f} s\n",
        ]
    )
