"""What commands print of a simulation: JSON fields, and numbers and costs for people."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..schedule import Costs, Schedule, Simulation
from ..schedule.costs import number_to_json
from ..view import timeline


def short(value: Fraction) -> str:
    """A number for people, three decimals at most."""
    return timeline.decimal(float(value))


def per_rank(values: Sequence[Fraction]) -> str:
    """One number a rank for people."""
    return " ".join(short(value) for value in values)


def simulation_json(
    simulation: Simulation, seconds: float, quality: dict[str, Any], offloads: bool = False
) -> dict[str, Any]:
    """The contract's object, with a ``note`` where ``auto`` or the offload pass says why.

    ``quality`` has the fields that compare it with the best possible, and of its robustness.

    ``generation_seconds`` of a file is its reading and checking. The fields of offload are there
    if it was requested or a file has some, even if no set leaves.
    """
    schedule = simulation.schedule
    peaks = simulation.peak_activation
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        **units_json(schedule),
        **schedule.arrangement_json,
        "cost": cost_json(schedule.costs),
        "makespan": number_to_json(simulation.makespan),
        "bubble": number_to_json(simulation.bubble),
        "span_bubble": number_to_json(simulation.span_bubble),
        "peak_activation": [number_to_json(peak) for peak in peaks],
        "peak_activation_vs_1f1b": number_to_json(max(peaks) / schedule.pp),
        **(
            {"peak_vocabulary_microbatches": simulation.peak_vocabulary}
            if schedule.barriers
            else {}
        ),
        **_exchange_json(simulation),
        "generation_seconds": round(seconds, 6),
        **quality,
        **(_offload_json(simulation) if offloads or simulation.transfers else {}),
        **({"note": schedule.note} if schedule.note else {}),
    }


def _exchange_json(simulation: Simulation) -> dict[str, Any]:
    hidden, steady = simulation.hidden_exchange, simulation.hidden_steady
    if hidden is None:
        return {}
    return {
        "exchange": [number_to_json(one.total) for one in simulation.exchange],
        "exposed_exchange": [number_to_json(one.exposed) for one in simulation.exchange],
        "hidden_exchange": number_to_json(hidden),
        "hidden_exchange_steady": None if steady is None else number_to_json(steady),
    }


def _offload_json(simulation: Simulation) -> dict[str, Any]:
    transfers = simulation.transfers
    return {
        "peak_host_activation": [number_to_json(x) for x in simulation.peak_host_activation],
        "offloaded_sets": transfers.sets if transfers else 0,
        "offload_stall": number_to_json(transfers.stall) if transfers else 0,
    }


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


def units_json(schedule: Schedule) -> dict[str, object]:
    """``slices``, where microbatches are cut: one number, or one each."""
    return {"slices": schedule.slices_json} if schedule.slices else {}


def units_text(schedule: Schedule) -> str:
    """For people, behind the number of microbatches."""
    each = ", costs of each" if schedule.costs.units is not None else ""
    return timeline.slices_text(schedule, ", slices ") + each
