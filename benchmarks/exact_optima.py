"""Optimal makespans of small pipelines in V placement, at every memory cap: test data.

    python -m benchmarks.exact_optima --seconds 60

writes ``tests/unit/schedule/exact_optima.json``. Cases that are there and proven are kept; each
other one gets ``--seconds`` of ``optimize`` from the order of ``v-cap``. A lower bound at one cap
is one for every smaller cap, an order at one cap is one for every larger cap. Needs the extra
``[optimize]``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from megatron_ext.schedule import Costs, ScheduleSpec, select
from megatron_ext.schedule.costs import number_to_json
from megatron_ext.schedule.generators.cap import v_cap_limits
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.optimize import optimize

FILE = Path(__file__).parents[1] / "tests/unit/schedule/exact_optima.json"
WHAT = (
    "Makespans of V placement with p ranks, m microbatches and at most cap_sets activation sets "
    "(one chunk's for one microbatch) on a rank, from F's start to W's end; cost is F, B, W of a "
    "rank and microbatch, hop that of a transfer. No order is below bound; proven: makespan is it. "
    "Made by benchmarks/exact_optima.py."
)
SIZES = [(p, m) for p in (2, 3, 4) for m in range(1, 9)]
COSTS = ([1, 1, 1], [1, 0.98, 0.74], [1, 1.25, 0.75])
Row = dict[str, Any]


def cases() -> Iterator[Row]:
    """All of them without makespans, the largest cap of a size first."""
    free = product(SIZES, COSTS, [0])
    for (p, m), cost, hop in [*free, *product(SIZES[:-2], COSTS[1:2], [0.05])]:
        least, most = v_cap_limits(p)
        for cap in range(most, least - 1, -1):
            yield {"p": p, "m": m, "cap_sets": cap, "cost": cost, "hop": hop}


def solved(row: Row, seconds: float, bound: Fraction) -> Row:
    """``row`` with what ``seconds`` give."""
    costs = Costs.of(*map(str, row["cost"]), str(row["hop"]))
    cap = ShareCap(Fraction(row["cap_sets"], 2 * row["p"]))
    start = select(ScheduleSpec("v-cap", row["p"], row["m"], costs=costs, cap=cap)).schedule
    made = optimize(start, seconds, row["cap_sets"])
    known = max(made.bound, bound, Fraction(str(row.get("bound", 0))))
    best = min(made.after, Fraction(str(row.get("makespan", made.after))))
    return {**row, **_result(best, known)}


def _result(makespan: Fraction, bound: Fraction) -> Row:
    result = {"makespan": number_to_json(makespan), "bound": number_to_json(bound)}
    return {**result, "proven": makespan == bound}


def group(row: Row) -> str:
    """What the caps of one problem have in common."""
    return json.dumps([row["p"], row["m"], row["cost"], row["hop"]])


def carry_orders(rows: list[Row]) -> list[Row]:
    """An order within a smaller cap is one within a larger cap."""
    best: dict[str, Fraction] = {}
    for row in sorted(rows, key=lambda row: row["cap_sets"]):
        mine = min(Fraction(str(row["makespan"])), best.get(group(row), Fraction(10**9)))
        best[group(row)] = mine
        row.update(_result(mine, Fraction(str(row["bound"]))))
    return rows


def main() -> None:
    """Solve what is not there, and write the file at the end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for one case")
    parser.add_argument("--most", type=int, default=32, help="of p x m")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    rows = json.loads(args.file.read_text())["rows"] if args.file.exists() else []
    have = {group(row) + str(row["cap_sets"]): row for row in rows}
    bounds: dict[str, Fraction] = {}
    found: list[Row] = []
    for case in (case for case in cases() if case["p"] * case["m"] <= args.most):
        row = have.get(group(case) + str(case["cap_sets"]), case)
        if not row.get("proven"):
            row = solved(row, args.seconds, bounds.get(group(row), Fraction(0)))
            print(json.dumps(row), flush=True)
        bounds[group(row)] = Fraction(str(row["bound"]))
        found.append(row)
    write(args.file, carry_orders(found))


def write(path: Path, rows: list[Row]) -> None:
    """One row a line."""
    body = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"what": {json.dumps(WHAT)},\n "rows": [\n  {body}\n ]}}\n')


if __name__ == "__main__":
    main()
