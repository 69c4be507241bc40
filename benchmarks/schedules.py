#!/usr/bin/env python3
"""Our schedules compared with stock Megatron's and PyTorch's orders, by simulation.

    python3 -m benchmarks.schedules [--ranks 4,8,16] [--output DIR] [--date YYYY-MM-DD]

Runs on a bare Python; PyTorch's orders are compared where torch can be imported. Writes
results/DATE-schedules.json and schedules.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import page as pages
from benchmarks import torch_lists
from benchmarks.page import Row
from megatron_ext.schedule import Costs, Schedule, generate, simulate

COSTS = (("1,1,1", "0"), ("1,1.1,0.8", "0.05"))  # F,B,W and the hop, in units of F
FACTORS = (2, 4)  # microbatches a rank
SHOWN = 8  # ranks of the table
OURS = ("zb-h1", "zb-h2", "interleaved-zb", "gis", "gis-h", "po", "v-min", "v-half", "v-zb")


def orders(pp: int, microbatches: int, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Every schedule of one setting by its name in the table; peers first."""
    yield "Megatron 1f1b", generate("1f1b", pp, microbatches, costs=costs)
    for chunks in (2, 4):
        order = generate("interleaved", pp, microbatches, chunks, costs)
        yield f"Megatron interleaved, v = {chunks}", order
    for name, _, _ in torch_lists.CLASSES if torch_lists.version() else ():
        yield name, torch_lists.schedule(name, pp, microbatches, costs)
    for name in OURS:
        yield name, generate(name, pp, microbatches, costs=costs)


def rows_of(ranks: list[int]) -> list[Row]:
    """Makespan, bubble and peak (in microbatches) of every schedule in every setting."""
    rows = []
    for pp in ranks:
        for m in (factor * pp for factor in FACTORS):
            for cost, hop in COSTS:
                for name, order in orders(pp, m, Costs.of(*cost.split(","), hop)):
                    run = simulate(order)
                    row: Row = {"name": name, "pp": pp, "microbatches": m, "cost": cost, "hop": hop}
                    row["makespan"], row["bubble"] = float(run.makespan), float(run.bubble)
                    rows.append(row | {"peak": float(max(run.peak_activation))})
                print(f"p = {pp}, m = {m}, costs {cost}, hop {hop}", flush=True)
    return rows


def setting(row: Row) -> tuple[Any, ...]:
    """What a row is compared within."""
    return tuple(row[key] for key in ("pp", "microbatches", "cost", "hop"))


def faster_peers(name: str, rows: list[Row]) -> str:
    """In how many settings a peer with no more memory than ``name`` is faster, and by how much."""
    by, count = [], 0
    for ours in (row for row in rows if row["name"] == name):
        count += 1
        peers = [
            row["makespan"]
            for row in rows
            if row["name"] not in OURS
            and setting(row) == setting(ours)
            and row["peak"] <= ours["peak"]
        ]
        if peers and min(peers) < ours["makespan"] * (1 - 1e-9):
            by.append(ours["makespan"] / min(peers) - 1)
    return f"{len(by)} of {count}, by up to {max(by):.1%}" if by else f"0 of {count}"


def body(data: Row) -> list[Any]:
    """The table, and how to read it."""
    rows = data["rows"]
    shown = [row for row in rows if row["pp"] == max(r["pp"] for r in rows if r["pp"] <= SHOWN)]
    settings = list(dict.fromkeys(map(setting, shown)))
    by = {(row["name"], setting(row)): row for row in shown}
    pp = shown[0]["pp"]
    heads = ["schedule", *(f"m = {m}, costs {cost}, hop {hop}" for _, m, cost, hop in settings)]
    heads += ["peak, of p", "faster peer at its memory"]
    cells = []
    for name in dict.fromkeys(row["name"] for row in shown):
        here = [by[name, one] for one in settings]
        bubbles = [f"{100 * row['bubble']:.1f}" for row in here]
        peak = max(row["peak"] for row in here) / pp
        faster = faster_peers(name, rows) if name in OURS else ""
        cells.append([name, *bubbles, f"{peak:.2f}", faster])
    return [
        "Run it again from the repository's root: `python3 -m benchmarks.schedules`. Only the rows "
        "of PyTorch need anything installed.",
        f"Bubble in per cent of the makespan for p = {pp}, simulated; nothing here was measured on "
        "a GPU. A pass of one of v chunks takes 1/v of its rank's F, B or W, so the launches and "
        "messages of more and smaller passes are not counted. *Peak* is the fullest rank's "
        "activation as a share of 1F1B's. The last column looks at all settings of p = "
        f"{data['ranks']}: in how many of them an order of Megatron or PyTorch takes no more "
        "memory and less time. DualPipeV's joint passes run one after the other here.",
        pages.grid(heads, cells),
    ]


def measure(args: argparse.Namespace) -> Row:
    """All rows, and torch's version."""
    return {
        "torch": torch_lists.version(),
        "rows": rows_of([int(p) for p in args.ranks.split(",")]),
    }


BENCHMARK = pages.Benchmark(
    "schedules",
    __doc__,
    "Schedules compared with Megatron's and PyTorch's",
    lambda data: f"m = {' and '.join(f'{factor}p' for factor in FACTORS)}",
    body,
    measure,
    {"ranks": ("4,8,16", "numbers of pipeline ranks")},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
