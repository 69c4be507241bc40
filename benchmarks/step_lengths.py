"""Steps that are planned for the lengths of their microbatches, as training plans them.

python3 -m benchmarks.step_lengths                    # step_lengths.md
python3 -m benchmarks.step_lengths --seeds 2          # fewer
python3 -m benchmarks.step_lengths --page-of FILE     # the page alone, of earlier results
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from benchmarks.page import parser_of, run
from megatron_ext.plan.loads import Load, rising, shares_of_loads
from megatron_ext.schedule import Costs, Schedule, ScheduleSpec, check, lower, select, simulate
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.planner import order_for_units

Row = dict[str, Any]
PP, MEAN, HIDDEN, SPREAD = 8, 4096, 4096, 0.3
FIRST = 1000  # seed
CAP = ShareCap(Fraction(6, 10))
NAMES = ("1f1b", "zb-h1", "interleaved-zb", "v-half", "v-zb", "v-cap")
SIZES = (16, 64)
WAYS = (  # (name, the order is free, tokens of a slice)
    ("given", False, None),
    ("free", True, None),
    ("given, slices", False, MEAN // 2),
    ("free, slices", True, MEAN // 2),
)


def draw(microbatches: int, seed: int) -> list[int]:
    """Lengths in tokens, ``MEAN`` on average but for rounding."""
    rng = random.Random(seed)
    found = [rng.lognormvariate(0, SPREAD) for _ in range(microbatches)]
    return [round(x * MEAN * microbatches / sum(found)) for x in found]


def numbers(schedule: Schedule) -> Row:
    """Idle share of the makespan in per cent, and the peak in microbatches of mean length."""
    run = simulate(schedule)
    held = float(max(schedule.peak_activation()))
    return {"idle": round(100 * float(run.bubble), 2), "memory": round(held, 2)}


def measure(name: str, microbatches: int, seed: int) -> Row:
    """Every way of planning one step."""
    lengths = draw(microbatches, seed)
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of(data: dict[str, Any], name: str, microbatches: int) -> list[Row]:
    wanted = name, microbatches
    return [r["ways"] for r in data["rows"] if (r["name"], r["microbatches"]) == wanted]


def page(data: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Steps planned for their lengths",
        "",
        f"Simulated {data['date']} with Python {data['python']} ({data['machine']}) in "
        f"{data['seconds']:.0f} s; load average {data['load']}. Nothing here was measured on a "
        f"GPU. All rows: [{data['results']}]({data['results']}).",
        "",
        f"    python3 -m benchmarks.step_lengths --seeds {data['seeds']}",
        "",
        f"What `--pp-microbatch-costs lengths` makes of a step: p={PP}, F=B=W, no hops, lengths "
        f"with a relative spread of {SPREAD:g} and a mean of {MEAN} tokens, hidden size {HIDDEN}; "
        f"means of {data['seeds']} seeds, from {FIRST} on. Per cent of the makespan that ranks "
        "are idle, and in brackets the peak in microbatches of mean length. *Equal lengths*: the "
        "searched order for these, run with the true ones. *Free*: microbatches may run in another "
        f"order. *Slices*: of {MEAN // 2} tokens at most. `v-cap` at {float(CAP.share):g} of "
        "1F1B's peak for microbatches of mean length, which the order for equal lengths exceeds.",
    ]
    ways = ["equal lengths", *(way for way, *_ in WAYS)]
    for size in SIZES:
        lines += ["", f"## {size} microbatches", ""]
        lines += [f"| schedule | {' | '.join(ways)} |", f"|---|{'--:|' * len(ways)}"]
        for name in NAMES:
            held = _ways(data, name, size)
            cells = [
                f"{_mean([row[way]['idle'] for row in held]):.1f} "
                f"({_mean([row[way]['memory'] for row in held]):.1f})"
                for way in ways
            ]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        "",
        "## Processor time of a plan",
        "",
        "Milliseconds, at most over all seeds: to make the order / with its messages and checks.",
        "",
        f"| schedule | microbatches | {' | '.join(ways[1:])} |",
        f"|---|--:|{'--:|' * len(ways[1:])}",
    ]
    for name in NAMES:
        for size in SIZES:
            held = _ways(data, name, size)
            cells = [
                f"{max(row[way]['order_ms'] for row in held):.0f} / "
                f"{max(row[way]['plan_ms'] for row in held):.0f}"
                for way in ways[1:]
            ]
            lines.append(f"| `{name}` | {size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ways(data: dict[str, Any], name: str, microbatches: int) -> list[Row]:
    """Of every seed."""
    return [
        row["ways"]
        for row in data["rows"]
        if (row["name"], row["microbatches"]) == (name, microbatches)
    ]


def _data(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name in NAMES:
        for size in SIZES:
            for seed in range(FIRST, FIRST + args.seeds):
                rows.append(measure(name, size, seed))
                print(name, size, seed, rows[-1]["ways"], flush=True)
    return {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = parser_of(__doc__, seeds=(8, "of each size"))
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds is 1 or more, not {args.seeds}")
    run(args, "step_lengths", lambda: _data(args), page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
