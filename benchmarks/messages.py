"""What message streams cost, and orders that were made for other costs than the machine's.

    python3 -m benchmarks.messages      # messages.md and results/, about two minutes of one core

Simulated: how many message streams a rank has (``--p2p``), and which costs the order was made for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.schedule import NAMES, Costs, Placement, generate, lower, simulate
from megatron_ext.schedule.network import STREAMS, Network

PP, MICROBATCHES = 8, 32
REAL = (Fraction(1), Fraction(115, 100), Fraction(85, 100))
HOPS = ("0", "0.05", "0.2")
NOISE, SEED = 0.03, 1
ORDERS = ("equal", "estimated", "measured", "real")
BASE = "1f1b"
_PARTS = 1000  # of a pass, for measured times
NETWORKS = {
    "ideal": None,
    **{streams: Network(streams) for streams in STREAMS},
    "edge, queue 1": Network("edge", True),
    "rank, queue 1": Network("rank", True),
}


def costs_for(order: str, hop: str, placement: Placement) -> Costs:
    """What an order is made for.

    ``estimated`` is a planner that is 5 % wrong about B and W and takes the hop for half of what it
    is; ``measured`` has an error of up to 3 % in each time of each stage.
    """
    if order == "equal":
        return Costs()
    if order == "estimated":
        wrong = (REAL[1] * Fraction(95, 100), REAL[2] * Fraction(105, 100))
        return Costs.of(1, *wrong, Fraction(hop) / 2)
    if order == "real":
        return Costs.of(*REAL, hop)
    rng = random.Random(SEED)
    stages = [
        [round(x * _PARTS * (1 + rng.uniform(-NOISE, NOISE)) / placement.chunks) for x in REAL]
        for _ in range(placement.num_stages)
    ]
    return Costs.of(hop=Fraction(hop) * _PARTS, stages=stages)


def measure(names: list[str]) -> Iterator[Row]:
    """One row a schedule, hop and order: makespans in units of F."""
    for name in names:
        placement = generate(name, PP, MICROBATCHES).placement
        for hop in HOPS:
            for order in ORDERS:
                costs = costs_for(order, hop, placement)
                schedule = lower(generate(name, PP, MICROBATCHES, costs=costs))
                row: Row = {"schedule": name, "hop": hop, "order": order}
                for key, network in NETWORKS.items():
                    row[key] = float(simulate(schedule, Costs.of(*REAL, hop), network).makespan)
                yield row


def body(data: Row) -> list[Any]:
    """The page."""
    at = {(r["schedule"], r["hop"], r["order"]): r for r in data["rows"]}
    names = list(dict.fromkeys(r["schedule"] for r in data["rows"]))

    def more(name: str, hop: str, order: str, way: str, than: str) -> str:
        """Per cent of what the order ``than`` takes with ideal messages."""
        return f"{100 * (at[name, hop, order][way] / at[name, hop, than]['ideal'] - 1):.1f}"

    def streams(way: str) -> Callable[[str], str]:
        return lambda name: " / ".join(more(name, hop, "equal", way, "equal") for hop in HOPS[1:])

    def lost(order: str, hop: str) -> Callable[[tuple[str, str]], str]:
        return lambda one: more(one[0], hop, order, one[1], "real")

    def time(order: str, way: str) -> Callable[[str], str]:
        return lambda name: f"{at[name, '0.2', order][way]:.2f}"

    def against(order: str, way: str) -> Callable[[str], str]:
        return lambda name: f"{at[BASE, '0.2', order][way] / at[name, '0.2', order][way]:.2f}"

    title: dict[str, Callable[[str], Any]] = {"schedule": "`{}`".format}
    before_and_after = {
        "before": time("equal", "rank"),
        "before, against 1f1b": against("equal", "rank"),
        "real costs alone": time("real", "rank"),
        "edge alone": time("equal", "edge"),
        "after": time("real", "edge"),
        "after, against 1f1b": against("real", "edge"),
    }
    parts: list[Any] = [
        "    megatron-ext simulate --schedule v-half --pp 8 --microbatches 32 --cost 1,1.15,0.85 "
        "--hop 0.2 --p2p rank",
        "A message stream runs one message after the other, and a posted receive holds it until "
        "its sender comes: one stream for each direction between two ranks (*edge*, what "
        "`--pp-p2p edge` makes), for two ranks (*pair*, PyTorch's NCCL backend before 2.15), for "
        "all messages of a rank (*rank*, torch 2.15's on the pipeline group). *Queue 1* is "
        "`CUDA_DEVICE_MAX_CONNECTIONS=1`.",
        "## What streams cost where the order was made for equal costs and no hop",
        "Per cent over ideal messages, at hop 0.05 / 0.2 of F.",
        pages.table(title | {way: streams(way) for way in list(NETWORKS)[1:]}, names),
        "`dualpipev` loses with one stream a direction too: its joint passes send an activation "
        "and a gradient the same way at once.",
        "## One stream a rank, hop 0.2: before and after",
        "Makespan, and speed against 1F1B in the same row's setting. *Before*: one stream a rank, "
        "order for equal costs. *After*: one stream a direction, order for the real costs and hop.",
        pages.table(title | before_and_after, names),
        "## What an order for other costs loses",
        "Per cent over the order for the real costs with ideal messages. *Equal*: 1,1,1 and no "
        "hop; *estimated*: B and W 5 % wrong, half the hop; *measured*: each time of each stage "
        "wrong by up to 3 %, seed 1. Negative where a heuristic happens to find a better order for "
        "the wrong costs.",
    ]
    for hop in HOPS:
        columns: dict[str, Any] = {"schedule": "`{0[0]}`".format, "way": "{0[1]}".format}
        columns |= {order: lost(order, hop) for order in ORDERS}
        cells = [(name, way) for name in names for way in STREAMS]
        parts += [f"Hop {hop}:", pages.table(columns, cells)]
    return parts


BENCHMARK = pages.Benchmark(
    "messages",
    __doc__,
    "Message streams, and orders for other costs",
    lambda data: (
        f"simulated, p = {PP}, m = {MICROBATCHES}, real costs F, B, W = 1, 1.15, 0.85; nothing "
        "here was measured on NCCL"
    ),
    body,
    lambda args: {"rows": list(measure(args.schedules.split(",")))},
    {"schedules": (",".join(NAMES), "with commas; 1f1b among them")},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
