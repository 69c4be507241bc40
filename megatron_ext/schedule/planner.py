"""The planner of a training run: its schedule for the units of any step, by what is known by then.

``select`` has chosen the schedule; the model is placed for it and cannot change. Costs and bytes
that are measured later may change its order, and under ``auto`` its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from .costs import Costs
from .link import Link
from .memory_cap import Cap, ShareCap
from .named import keeps
from .schedule import Schedule
from .select import placed_alike
from .simulate import simulate
from .spec import AUTO, Cut, OffloadSpec, ScheduleSpec
from .training import TrainingOrder, select_within
from .units import check_slices

_KEPT = 8  # orders
Shares = tuple[tuple[Fraction, ...], ...]  # of each slice: of F, B, W and the set of a whole one


class StepUnits(NamedTuple):
    """The units of one training step.

    Attributes:
        microbatches: of the step.
        shares: of each microbatch; empty: all are equal.
        free: the microbatches may run in another order than given; the answer says in which.
    """

    microbatches: int
    shares: tuple[Shares, ...] = ()
    free: bool = False


class Knowledge(NamedTuple):
    """What a run knows by now beside its request.

    Attributes:
        link: transfer times, to decide which sets leave; a file that offloads has its own.
        costs: of the passes; None: those that the order is made for.
        reorder: make the order for ``costs`` too, and take it if it is faster under them. Otherwise
            they only help to decide what is offloaded.
    """

    link: Link | None = None
    costs: Costs | None = None
    reorder: bool = False


NOTHING = Knowledge()


@dataclass(frozen=True)
class Planner:
    """Plans of one run.

    Attributes:
        spec: the schedule by name, for the full batch. Its offload is left open: which link there
            is may have to be measured first.
        cap: of the request; that of ``spec`` may be of one order.
        wanted: what is offloaded, as ``OffloadSpec``; None: nothing, or as a file says.
        cut: of every microbatch of a step of equal ones.
        chosen: ``auto`` has chosen the name, and may choose another one with the same placement.
        paired: adds communication that pairs hide to measured costs.
    """

    spec: ScheduleSpec
    cap: Cap | None = None
    wanted: str | int | None = None
    cut: Cut | None = None
    chosen: bool = False
    paired: Callable[[Costs], Costs] | None = None
    _plans: dict[tuple[Any, ...], Schedule] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, units: StepUnits, knowledge: Knowledge = NOTHING) -> Schedule:
        """The training schedule for ``units``. Those of equal microbatches are searched for, and
        the last few are kept; others are made at once.

        Raises:
            CapExceeded: it does not keep the cap.
            ValueError: it does not exist.
        """
        if units.shares:
            known = self._plans.get((units.microbatches, *NOTHING))
            return order_for_units(
                self.spec, units.shares, units.free, known, self.cap, self.chosen
            )
        key = units.microbatches, *knowledge
        if key not in self._plans:
            self._plans[key] = self._order(units.microbatches, knowledge).searched()
            while len(self._plans) > _KEPT:
                del self._plans[next(iter(self._plans))]
        return self._plans[key]

    def _order(self, microbatches: int, knowledge: Knowledge) -> TrainingOrder:
        """The request for one order."""
        link, costs, reorder = knowledge
        spec = replace(self.spec, microbatches=microbatches).sliced(self.cut)
        if costs is not None:
            costs = costs if self.cut is None else self.cut.costs(costs, microbatches)
            costs = costs if self.paired is None else self.paired(costs)
        if self.wanted is None or link is None:
            spec = spec.order_alone()
        else:
            spec = replace(spec, offload=OffloadSpec(self.wanted, link))
        asked = (
            self.cap if self.wanted is None else None
        )  # what stays on the device is decided later
        former = TrainingOrder(replace(spec, times=costs), asked=asked, free=self.chosen)
        if costs is None or not reorder:
            return former
        again = replace(spec, costs=costs)
        if self.chosen:
            again = replace(
                again, name=AUTO, names=placed_alike(spec), cap=self.cap, group_size=None
            )
        return replace(former, again=again)


def order_for_units(
    spec: ScheduleSpec,
    units: Sequence[Shares],
    free: bool,
    known: Schedule | None = None,
    cap: Cap | None = None,
    chosen: bool = False,
) -> Schedule:
    """The fastest of a few list schedules; the same in every process.

    Args:
        spec: of the schedule by name, for as many whole microbatches; its effort is left out.
        units: as ``StepUnits.shares``.
        free: as there.
        known: an order for equal microbatches that was searched for; it is taken where it is faster
            for these, too.
        cap, chosen: as ``Planner``; ``spec`` may have no cap, or one of an order.

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
    found = select_within(asked, cap, chosen).schedule
    if found.arrangement is not None:
        found = replace(found, arrangement=found.arrangement._replace(saved=None))
    if known is None or counts:
        return found
    other = replace(known, costs=found.costs, arrangement=found.arrangement)
    fits = all(each is None or keeps(each, other) for each in (spec.cap, cap))
    return other if fits and simulate(other).makespan < simulate(found).makespan else found


def _require_room(spec: ScheduleSpec, units: Sequence[Shares]) -> None:
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
