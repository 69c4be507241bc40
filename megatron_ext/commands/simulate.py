"""``simulate``: bubble, makespan and peak activation of a schedule; streams of an MoE layer."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..schedule.network import Network
from ..schedule.simulate import Simulation
from .common import InputError, Parser, add_schedule_options, hint, offloads, schedule_of
from .moe_layer import add_layer_options, refuse_layer_options, simulate_layer
from .network import add_network_options, network_json, network_of, network_text
from .quality import Quality, add_jitter_options, jitter_of, percent, simulated
from .results import costs_text, per_rank, short, simulation_json, units_text


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "simulate", help="simulate a schedule (bubble, makespan, peak), or an MoE layer with --moe"
    )
    add_schedule_options(parser, required=False)
    add_network_options(parser)
    add_jitter_options(parser)
    add_layer_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    if args.moe:
        simulate_layer(args)
        return
    refuse_layer_options(args)
    if args.schedule is None:
        raise InputError("the following arguments are required: --schedule (or --moe)")
    network, noise = network_of(args), jitter_of(args)
    started = time.perf_counter()
    with Progress("simulate") as progress:
        progress(f"making {args.schedule}")
        schedule = schedule_of(args)
        seconds = time.perf_counter() - started
        runs = "" if noise is None else f", {noise.runs} runs"
        progress(f"simulating {schedule.name}{runs}")
        simulation, quality = simulated(schedule, args, network, noise)
    if args.json:
        data = simulation_json(simulation, seconds, quality.json, offloads(args))
        print(json.dumps({**data, **network_json(network)}))
    else:
        print(_simulation_table(simulation, quality, seconds, network), end="")
        if hint(args):
            print(f"  note             {hint(args)}")


def _simulation_table(
    simulation: Simulation, quality: Quality, seconds: float, network: Network | None
) -> str:
    schedule = simulation.schedule
    peaks = simulation.peak_activation
    return "\n".join(
        [
            f"{schedule.name}: pp {schedule.pp}, chunks {schedule.chunks}, "
            f"microbatches {schedule.microbatches}{units_text(schedule)}; "
            f"{costs_text(schedule.costs)}"
            f"{network_text(network)}",
            f"  makespan         {short(simulation.makespan)}",
            *quality.lines,
            f"  bubble           {short(100 * simulation.bubble)} %",
            f"  span bubble      {short(100 * simulation.span_bubble)} %",
            f"  peak activation  {short(max(peaks))} microbatches, "
            f"{short(100 * max(peaks) / schedule.pp)} % of 1F1B's {schedule.pp}",
            f"    per rank       {per_rank(peaks)}",
            *_order_lines(simulation),
            *_exchange_lines(simulation),
            *_vocabulary_lines(simulation),
            *_offload_lines(simulation),
            f"  generated in     {seconds:.3f} s",
            *([f"  {_why(simulation)}{schedule.note}"] if schedule.note else []),
            "",
        ]
    )


def _why(simulation: Simulation) -> str:
    return "note             " if simulation.transfers else "chosen because   "


def _order_lines(simulation: Simulation) -> list[str]:
    found = simulation.schedule.arrangement
    return [] if found is None else [f"  microbatches     {found}"]


def _exchange_lines(simulation: Simulation) -> list[str]:
    hidden, steady = simulation.hidden_exchange, simulation.hidden_steady
    if hidden is None:
        return []
    worst = max(simulation.exchange, key=lambda one: one.exposed)
    between = "" if steady is None else f", {percent(steady)} between first B and last F"
    return [
        f"  exchange         {percent(hidden)} hidden{between}; "
        f"{short(worst.exposed)} of {short(worst.total)} not, on the worst rank",
    ]


def _vocabulary_lines(simulation: Simulation) -> list[str]:
    if not simulation.schedule.barriers:
        return []
    kept = simulation.peak_vocabulary
    return [
        f"  kept from S to T {max(kept)} microbatches",
        f"    per rank       {' '.join(map(str, kept))}",
    ]


def _offload_lines(simulation: Simulation) -> list[str]:
    transfers = simulation.transfers
    if transfers is None:
        return []
    host = simulation.peak_host_activation
    return [
        f"  offloaded        {transfers.sets} activation sets, stall {short(transfers.stall)}",
        f"    host peak      {short(max(host))} microbatches; per rank {per_rank(host)}",
    ]
