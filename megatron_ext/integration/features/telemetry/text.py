"""What the log says of bubble and peak."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from ....schedule.baseline import Promise, promise, stock
from ....schedule.generators import generate
from ....schedule.schedule import Schedule
from ...callbacks import Loads


def of_plan(plan: Schedule, own: Promise, loads: Loads | None = None) -> str:
    """A plan beside 1F1B, which runs the microbatches of ``loads`` as they are given."""
    other = stock(plan)
    if other is not None and loads is not None:
        other = _as_given(other, loads)
    bubble, peak = f"planned bubble {own.bubble_text}", f"peak activations {own.peak_text}"
    peak += " microbatches a rank"
    if other is not None:
        beside = promise(other)
        bubble += f" (1F1B {beside.bubble_text})"
        peak += f" (1F1B {beside.peak_text})"
    chunks = f"{plan.chunks} chunk{'s' * (plan.chunks > 1)}"
    slices = f" in {plan.slices[0]} slices each" if plan.slices else ""
    return (
        f"{plan.name}, {plan.pp} ranks x {chunks}, {plan.microbatches} microbatches"
        f"{slices}: {bubble}, {peak}"
    )


def _as_given(stock: Schedule, loads: Loads) -> Schedule:
    """1F1B of these microbatches, whole, in the order in which they are given."""
    rows = {
        number: tuple(sum(column, Fraction(0)) for column in zip(*units))
        for number, units in zip(loads.order, loads.units)
    }
    costs = replace(stock.costs, units=tuple(rows[number] for number in sorted(rows)))
    return generate("1f1b", stock.pp, stock.microbatches, costs=costs)


def in_line(percent: float, peak: float, promised: Promise) -> str:
    """Behind Megatron's own numbers, for a bubble in percent and a peak in microbatches."""
    return (
        f" pipeline bubble: {percent:.1f} % (plan {promised.bubble_text}) | peak "
        f"activations: {peak:.4g} microbatches (plan {promised.peak_text}) |"
    )
