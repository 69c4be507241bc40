"""Orders for one step of a training, made for its own microbatches and without a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from .memory_cap import ShareCap
from .named import keeps
from .schedule import Schedule
from .select import select
from .simulate import simulate
from .spec import ScheduleSpec
from .units import check_slices


def order_for_units(
    spec: ScheduleSpec,
    units: Sequence[Sequence[tuple[Fraction, ...]]],
    free: bool,
    known: Schedule | None = None,
) -> Schedule:
    """The fastest of a few list schedules; the same in every process.

    Args:
        spec: of the schedule by name, for as many whole microbatches; its effort is left out.
        units: of each microbatch, for each of its slices, the shares of F, B, W and the set.
        free: the microbatches may run in another order; the answer says in which.
        known: an order for equal microbatches that was searched for; it is taken where it is faster
            for these, too.

    Raises:
        CapExceeded: none keeps the cap.
        ValueError: there is none, or a microbatch alone is larger than the cap.
    """
    counts = check_slices([len(rows) for rows in units], len(units))
    costs = replace(spec.costs, units=tuple(row for rows in units for row in rows))
    asked = replace(
        spec, microbatches=len(units), costs=costs, slices=counts, effort=0, reorder=free
    )
    _require_room(spec, units)
    found = select(asked).schedule
    if found.arrangement is not None:
        found = replace(found, arrangement=found.arrangement._replace(saved=None))
    if known is None or counts:
        return found
    other = replace(known, costs=found.costs, arrangement=found.arrangement)
    fits = spec.cap is None or keeps(spec.cap, other)
    return other if fits and simulate(other).makespan < simulate(found).makespan else found


def _require_room(spec: ScheduleSpec, units: Sequence[Sequence[tuple[Fraction, ...]]]) -> None:
    """Refuse a cap that does not hold one microbatch, on ranks that need all of its slices."""
    if not isinstance(spec.cap, ShareCap):
        return
    sizes = [sum((row[-1] for row in rows), Fraction(0)) for rows in units]
    room, largest = spec.cap.share * spec.pp, max(sizes)
    if largest > room:
        raise ValueError(
            f"a microbatch takes {float(largest):.4g} times the activations of a whole one, but a "
            f"cap of {float(spec.cap.share):.4g} of 1F1B's peak holds {float(room):.4g}; raise the "
            "cap, or give shorter microbatches"
        )
