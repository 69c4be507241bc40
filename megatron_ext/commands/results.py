"""Formats of numbers, costs and units, for people and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..schedule import Costs, Schedule
from ..view import timeline


def short(value: Fraction) -> str:
    """A number for people, three decimals at most."""
    return timeline.decimal(float(value))


def per_rank(values: Sequence[Fraction]) -> str:
    """One number a rank for people."""
    return " ".join(short(value) for value in values)


def cost_json(costs: Costs) -> dict[str, Any]:
    """The contract's ``cost``: times per rank and microbatch; per-stage costs are not repeated,
    nor those of single microbatches."""
    return {key: x for key, x in costs.to_json().items() if key not in ("stages", "units")}


def costs_text(costs: Costs) -> str:
    """The costs for people."""
    passes = zip("FBW", (costs.forward, costs.backward_input, costs.backward_weight))
    times = "per stage" if costs.stages else ", ".join(f"{op} {short(x)}" for op, x in passes)
    exchange = ""
    if costs.exchange and len(costs.exchange) == 1:
        f, b = costs.exchange[0]
        exchange = f", exchange {short(f)} of F, {short(b)} of B"
    return f"costs {times}, hop {short(costs.hop)}{exchange}"


def units_text(schedule: Schedule) -> str:
    """For people, behind the number of microbatches."""
    each = ", costs of each" if schedule.costs.units is not None else ""
    return timeline.slices_text(schedule, ", slices ") + each
