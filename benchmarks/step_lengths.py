"""Steps that are planned for the lengths of their microbatches, as training plans them.

python3 -m benchmarks.step_lengths                    # step_lengths.md
python3 -m benchmarks.step_lengths --seeds 2          # fewer
python3 -m benchmarks.step_lengths --page-of FILE     # the page alone, of earlier results
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import Any

from benchmarks import page as pages
from benchmarks.lengths import FIRST, MEAN, PP, scaled, seeds_from_first
from benchmarks.page import Row
from megatron_ext.plan.loads import Load, rising, shares_of_loads
from megatron_ext.schedule import Costs, Schedule, ScheduleSpec, check, lower, select, simulate
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.planner import order_for_units

HIDDEN, SPREAD = 4096, 0.3
CAP = ShareCap(Fraction(6, 10))
NAMES = ("1f1b", "zb-h1", "interleaved-zb", "v-half", "v-zb", "v-cap")
SIZES = (16, 64)
WAYS = (  # (name, the order is free, tokens of a slice)
    ("given", False, None),
    ("free", True, None),
    ("given, slices", False, MEAN // 2),
    ("free, slices", True, MEAN // 2),
)


def numbers(schedule: Schedule) -> Row:
    """Idle share of the makespan in per cent, and the peak in microbatches of mean length."""
    run = simulate(schedule)
    held = float(max(schedule.peak_activation()))
    return {"idle": round(100 * float(run.bubble), 2), "memory": round(held, 2)}


def measure(name: str, microbatches: int, seed: int) -> Row:
    """Every way of planning one step."""
    rng = random.Random(seed)
    lengths = scaled([rng.lognormvariate(0, SPREAD) for _ in range(microbatches)], MEAN)
    loads, whole = [Load.of([n]) for n in lengths], Load.of([MEAN])
    cap = CAP if name == "v-cap" else None
    spec = ScheduleSpec(name, PP, microbatches, costs=Costs(), cap=cap)
    known = select(spec).schedule
    row: Row = {"name": name, "microbatches": microbatches, "seed": seed, "ways": {}}
    units = shares_of_loads(loads, whole, HIDDEN)
    costs = known.costs.with_units([unit for rows in units for unit in rows])
    row["ways"]["equal lengths"] = numbers(replace(known, costs=costs))
    for way, free, tokens in WAYS:
        started = time.process_time()
        counts = None if tokens is None else [-(-n // tokens) for n in lengths]
        units = shares_of_loads(loads, whole, HIDDEN, counts)
        if free:
            units = tuple(units[j] for j in rising(units))
        order = order_for_units(spec, units, free, known)
        made = time.process_time()
        check(lower(order))
        row["ways"][way] = numbers(order) | {
            "order_ms": round(1000 * (made - started), 1),
            "plan_ms": round(1000 * (time.process_time() - started), 1),
        }
    return row


def rows_of(seeds: int) -> Row:
    """All rows; progress on the terminal."""
    rows = []
    for name in NAMES:
        for size in SIZES:
            for seed in seeds_from_first(seeds):
                rows.append(measure(name, size, seed))
                print(name, size, seed, rows[-1]["ways"], flush=True)
    return {"rows": rows}


def body(data: Row) -> list[Any]:
    """The page."""
    ways = ["equal lengths", *(way for way, *_ in WAYS)]
    of: dict[tuple[str, int], list[Row]] = {(name, size): [] for name in NAMES for size in SIZES}
    for row in data["rows"]:
        of[row["name"], row["microbatches"]].append(row["ways"])

    def mean(name: str, size: int, way: str) -> str:
        idle, memory = (
            fmean(row[way][key] for row in of[name, size]) for key in ("idle", "memory")
        )
        return f"{idle:.1f} ({memory:.1f})"

    def most(name: str, size: int, way: str) -> str:
        return " / ".join(
            f"{max(row[way][key] for row in of[name, size]):.0f}" for key in ("order_ms", "plan_ms")
        )

    parts: list[Any] = [
        f"What `--pp-microbatch-costs lengths` makes of a step: p={PP}, F=B=W, no hops, lengths "
        f"with a relative spread of {SPREAD:g} and a mean of {MEAN} tokens, hidden size {HIDDEN}; "
        f"means of {data['seeds']} seeds, from {FIRST} on. Per cent of the makespan that ranks "
        "are idle, and in brackets the peak in microbatches of mean length. *Equal lengths*: the "
        "searched order for these, run with the true ones. *Free*: microbatches may run in another "
        f"order. *Slices*: of {MEAN // 2} tokens at most. `v-cap` at {float(CAP.share):g} of "
        "1F1B's peak for microbatches of mean length, which the order for equal lengths exceeds.",
    ]
    for size in SIZES:
        cells: list[Any] = [
            (f"`{name}`", *(mean(name, size, way) for way in ways)) for name in NAMES
        ]
        parts += [f"## {size} microbatches", pages.grid(("schedule", *ways), cells)]
    cells = [(f"`{one[0]}`", one[1], *(most(*one, way) for way in ways[1:])) for one in of]
    return [
        *parts,
        "## Processor time of a plan",
        "Milliseconds, at most over all seeds: to make the order / with its messages and checks.",
        pages.grid(("schedule", "microbatches", *ways[1:]), cells),
    ]


BENCHMARK = pages.Benchmark(
    "step_lengths",
    __doc__,
    "Steps planned for their lengths",
    lambda data: "simulated, nothing here was measured on a GPU",
    body,
    lambda args: rows_of(args.seeds),
    {"seeds": (8, "of each size")},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
