"""Whole steps with slices, simulated from the passes that the GPU suite measured of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from megatron_ext.schedule import Costs, generate, simulate

PP = 8
MICROBATCHES = (4, 8)
# Of whole microbatches, then of slices.
WHOLE = ("1f1b", "interleaved", "v-zb")
SLICED = ("1f1b", "v-half", "v-zb")


def steps(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, int, float, float]]:
    """(tokens and slices, schedule, microbatches, step in ms, peak in microbatches) of a pipeline
    whose ranks hold one such layer, or half of one in each of two chunks.

    Orders are made without a search, in little time. Whole microbatches take the kernels that
    slices need; slices are even. *Joined*: one W for all slices, as long as a whole one.
    """
    whole_w: list[float] = []
    for row in rows:
        if not any(sum(row["ms"][op]) for op in "FBW") or row["cut"] != "even":
            continue
        count = len(row["lengths"])
        if count == 1:
            whole_w = row["ms"]["W"]
        for name, joined in _ways(count):
            weights = whole_w * count if joined else row["ms"]["W"]
            times = [
                row["ms"]["F"],
                row["ms"]["B"],
                [x / (count if joined else 1) for x in weights],
            ]
            whole = [Fraction(sum(each)).limit_denominator(10**6) for each in times]
            for m in MICROBATCHES:
                costs = Costs.of(*whole)
                if count > 1:
                    costs = costs.with_units(_shares(times, row, whole) * m)
                schedule = generate(name, PP, m, costs=costs, slices=count, effort=0, joined=joined)
                run = simulate(schedule)
                what = f"{name}, W joined" if joined else name
                yield (
                    f"{row['tokens']} tokens: {count}", what, m, float(run.makespan),
                    float(max(run.peak_activation)),
                )  # fmt: skip


def _ways(count: int) -> list[tuple[str, bool]]:
    """Schedules, and whether all slices have one W."""
    if count == 1:
        return [(name, False) for name in WHOLE]
    return [(name, joined) for name in SLICED for joined in (False, True)[: 1 + (name != "1f1b")]]


def _shares(
    times: Sequence[Sequence[float]], row: dict[str, Any], whole: Sequence[Fraction]
) -> list[tuple[Fraction, ...]]:
    return [
        (*(Fraction(x).limit_denominator(10**6) / y for x, y in zip(each, whole, strict=True)),
         Fraction(length, row["tokens"]))
        for each, length in zip(zip(*times, strict=True), row["lengths"], strict=True)
    ]  # fmt: skip
