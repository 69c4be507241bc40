"""Whole steps with slices, simulated from the passes that the GPU suite measured of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from megatron_ext.schedule import Costs, generate, simulate

PP = 8
MICROBATCHES = (4, 8)
# (schedule, chunks): whole microbatches, then slices.
WHOLE = (("1f1b", 1), ("interleaved", 2), ("v-zb", 2))
SLICED = ("1f1b", "v-half", "v-zb")


def steps(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, int, float, float]]:
    """(tokens and slices, schedule, microbatches, step in ms, peak in microbatches) of a pipeline
    whose ranks hold one such layer, or half of one in each of two chunks.

    Orders are made without a search, in little time. Whole microbatches take the kernels that
    slices need; slices are even.
    """
    for row in rows:
        if not any(sum(row["ms"][op]) for op in "FBW") or row["cut"] == "balanced":
            continue
        count = len(row["lengths"])
        names = SLICED if count > 1 else [name for name, _ in WHOLE]
        if count == 1 and row["cut"] != "even":
            continue
        whole = [Fraction(sum(row["ms"][op])).limit_denominator(10**6) for op in "FBW"]
        for m in MICROBATCHES:
            costs = Costs.of(*whole)
            if count > 1:
                costs = costs.with_units(_shares(row, whole) * m)
            for name in names:
                schedule = generate(name, PP, m, costs=costs, slices=count, effort=0)
                run = simulate(schedule)
                yield (
                    f"{row['tokens']} tokens: {count}", name, m, float(run.makespan),
                    float(max(run.peak_activation)),
                )  # fmt: skip


def _shares(row: dict[str, Any], whole: Sequence[Fraction]) -> list[tuple[Fraction, ...]]:
    times = zip(*(row["ms"][op] for op in "FBW"), strict=True)
    return [
        (*(Fraction(x).limit_denominator(10**6) / y for x, y in zip(each, whole, strict=True)),
         Fraction(length, row["tokens"]))
        for each, length in zip(times, row["lengths"], strict=True)
    ]  # fmt: skip
