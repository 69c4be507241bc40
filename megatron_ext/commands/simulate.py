"""``simulate``: bubble, makespan and peak activation of a schedule; streams of an MoE layer."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..schedule.network import Network
from .common import (
    InputError,
    Parser,
    add_schedule_options,
    hint,
    offloads,
    schedule_of,
)
from .moe_layer import add_layer_options, refuse_layer_options, simulate_layer
from .network import add_network_options, network_json, network_of, network_text
from .numbers import Shown, json_of, lines_of
from .quality import add_jitter_options, jitter_of, simulated
from .results import costs_text, units_text


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
    shown = Shown(simulation, quality, seconds, offloads(args))
    if args.json:
        print(json.dumps({**json_of(shown), **network_json(network)}))
    else:
        print(_text(shown, network))
        if hint(args):
            print(f"  note             {hint(args)}")


def _text(shown: Shown, network: Network | None) -> str:
    schedule = shown.run.schedule
    why = "note" if shown.run.transfers else "chosen because"
    return "\n".join(
        [
            f"{schedule.name}: pp {schedule.pp}, chunks {schedule.chunks}, "
            f"microbatches {schedule.microbatches}{units_text(schedule)}; "
            f"{costs_text(schedule.costs)}{network_text(network)}",
            *lines_of(shown),
            *([f"  {why:<17}{schedule.note}"] if schedule.note else []),
        ]
    )
