"""What message streams cost, and orders that were made for other costs than the machine's.

    python3 -m benchmarks.messages      # messages.md and results/, about two minutes of one core

Simulated: how many message streams a rank has (``--p2p``), and which costs the order was made for.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_ext.schedule import (
    NAMES,
    Costs,
    Placement,
    Schedule,
    generate,
    lower,
    simulate,
)
from megatron_ext.schedule.network import STREAMS, Network

HERE = Path(__file__).parent
PP, MICROBATCHES = 8, 32
REAL = (Fraction(1), Fraction(115, 100), Fraction(85, 100))
HOPS = ("0", "0.05", "0.2")
NOISE, SEED = 0.03, 1
ORDERS = ("equal", "estimated", "measured", "real")
BASE = "1f1b"
_PARTS = 1000  # of a pass, for measured times


def real(hop: str) -> Costs:
    """The machine's."""
    return Costs.of(*REAL, hop)


def costs_for(order: str, hop: str, placement: Placement) -> Costs:
    """What an order is made for.

    ``estimated`` is a planner that is 5 % wrong about B and W and takes the hop for half of what it
    is; ``measured`` has an error of up to 3 % in each time of each stage.
    """
    if order == "equal":
        return Costs()
    if order == "estimated":
        return Costs.of(
            1, REAL[1] * Fraction(95, 100), REAL[2] * Fraction(105, 100), Fraction(hop) / 2
        )
    if order == "real":
        return real(hop)
    rng = random.Random(SEED)
    stages = [
        [round(x * _PARTS * (1 + rng.uniform(-NOISE, NOISE)) / placement.chunks) for x in REAL]
        for _ in range(placement.num_stages)
    ]
    return Costs.of(hop=Fraction(hop) * _PARTS, stages=stages)


def orders(name: str, hop: str) -> Iterator[tuple[str, Schedule]]:
    """Lowered, for each kind of costs."""
    options: dict[str, Any] = {"memory_cap": None}
    placement = generate(name, PP, MICROBATCHES).placement
    for order in ORDERS:
        yield (
            order,
            lower(
                generate(name, PP, MICROBATCHES, costs=costs_for(order, hop, placement), **options)
            ),
        )


def measure(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a schedule, hop and order: makespans in units of F."""
    rows = []
    for name in names:
        for hop in HOPS:
            for order, schedule in orders(name, hop):
                run = {"ideal": simulate(schedule, real(hop)).makespan}
                for streams in STREAMS:
                    run[streams] = simulate(schedule, real(hop), Network(streams)).makespan
                run["rank, queue 1"] = simulate(schedule, real(hop), Network("rank", True)).makespan
                run["edge, queue 1"] = simulate(schedule, real(hop), Network("edge", True)).makespan
                rows.append(
                    {"schedule": name, "hop": hop, "order": order}
                    | {key: float(value) for key, value in run.items()}
                )
    return rows


def page(rows: list[dict[str, Any]], head: dict[str, Any]) -> str:
    """Markdown."""
    at = {(r["schedule"], r["hop"], r["order"]): r for r in rows}
    names = list(dict.fromkeys(r["schedule"] for r in rows))

    def more(name: str, hop: str, order: str, way: str, than: str = "ideal") -> float:
        """Per cent of what the real costs' order takes with ideal messages, or with ``than``."""
        base = at[name, hop, order if than == "ideal" else than]["ideal"]
        return 100 * (at[name, hop, order][way] / base - 1)

    lines = [
        "# Message streams, and orders for other costs",
        "",
        f"Simulated {head['date']} with Python {head['python']} in {head['seconds']:.0f} s: "
        f"p = {PP}, m = {MICROBATCHES}, real costs F, B, W = 1, 1.15, 0.85. Nothing here was "
        "measured "
        f"on NCCL. All rows: [{head['results']}]({head['results']}).",
        "",
        "    python3 -m benchmarks.messages",
        "    megatron-ext simulate --schedule v-half --pp 8 --microbatches 32 "
        "--cost 1,1.15,0.85 --hop 0.2 --p2p rank",
        "",
        "A message stream runs one message after the other, and a posted receive holds it "
        "until its "
        "sender comes: one stream for each direction between two ranks (*edge*, what "
        "`--pp-p2p edge` "
        "makes), for two ranks (*pair*, PyTorch's NCCL backend before 2.15), for all "
        "messages of a rank "
        "(*rank*, torch 2.15's on the pipeline group). *Queue 1* is "
        "`CUDA_DEVICE_MAX_CONNECTIONS=1`.",
        "",
        "## What streams cost where the order was made for equal costs and no hop",
        "",
        "Per cent over ideal messages, at hop 0.05 / 0.2 of F.",
        "",
        "| schedule | edge | pair | rank | edge, queue 1 | rank, queue 1 |",
        "|---|---|---|---|---|---|",
    ]
    ways = (*STREAMS, "edge, queue 1", "rank, queue 1")
    for name in names:
        cells = [
            " / ".join(f"{more(name, hop, 'equal', way):.1f}" for hop in HOPS[1:]) for way in ways
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        "",
        "`dualpipev` loses with one stream a direction too: its joint passes send an "
        "activation and a "
        "gradient the same way at once.",
        "",
        "## One stream a rank, hop 0.2: before and after",
        "",
        "Makespan, and speed against 1F1B in the same row's setting. *Before*: one stream a "
        "rank, order "
        "for equal costs. *After*: one stream a direction, order for the real costs and hop.",
        "",
        "| schedule | before | against 1f1b | real costs alone | edge alone | after | "
        "against 1f1b |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        before, after = at[name, "0.2", "equal"]["rank"], at[name, "0.2", "real"]["edge"]
        base = at[BASE, "0.2", "equal"]["rank"], at[BASE, "0.2", "real"]["edge"]
        lines.append(
            f"| `{name}` | {before:.2f} | {base[0] / before:.2f} | "
            f"{at[name, '0.2', 'real']['rank']:.2f} | {at[name, '0.2', 'equal']['edge']:.2f} | "
            f"{after:.2f} | {base[1] / after:.2f} |"
        )
    lines += [
        "",
        "## What an order for other costs loses",
        "",
        "Per cent over the order for the real costs with ideal messages. *Equal*: 1,1,1 and "
        "no hop; "
        "*estimated*: B and W 5 % wrong, half the hop; *measured*: each time of each stage "
        "wrong by up "
        "to 3 %, seed 1. Negative where a heuristic happens to find a better order for the "
        "wrong costs.",
        "",
    ]
    for hop in HOPS:
        lines += [
            f"Hop {hop}:",
            "",
            "| schedule | way | equal | estimated | measured | real |",
            "|---|---|---|---|---|---|",
        ]
        for name in names:
            for way in STREAMS:
                cells = [f"{more(name, hop, order, way, 'real'):.1f}" for order in ORDERS]
                lines.append(f"| `{name}` | {way} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the page and its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the page")
    parser.add_argument("--schedules", help="with commas; 1f1b among them; default all")
    args = parser.parse_args()
    names = tuple(args.schedules.split(",")) if args.schedules else NAMES
    started = time.perf_counter()
    rows = measure(names)
    today = date.today().isoformat()
    results = f"results/{today}-messages.json"
    head = {
        "date": today,
        "python": platform.python_version(),
        "seconds": time.perf_counter() - started,
        "results": results,
    }
    path = args.output / results
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**head, "pp": PP, "microbatches": MICROBATCHES, "rows": rows}) + "\n"
    )
    (args.output / "messages.md").write_text(page(rows, head))


if __name__ == "__main__":
    main()
