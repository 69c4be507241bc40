"""The order that a training run follows for one number of microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from .memory_cap import Cap
from .named import CapExceeded, Selected, keeps
from .schedule import Schedule
from .select import placed_alike, select
from .simulate import simulate
from .spec import AUTO, ScheduleSpec


def select_within(spec: ScheduleSpec, cap: Cap | None, free: bool) -> Selected:
    """``select``; where that exceeds ``cap``, for which the options of ``spec`` were chosen with
    other microbatches, what keeps it.

    Args:
        free: another name with the same placement will do.

    Raises:
        CapExceeded: nothing does.
        ValueError: there is no such schedule.
    """
    found = select(spec)
    if cap is None or spec.offload is not None or keeps(cap, found.schedule):
        return found
    again = replace(spec, cap=cap, group_size=None)
    if free:
        again = replace(again, name=AUTO, names=placed_alike(spec))
    return select(again)


@dataclass(frozen=True)
class TrainingOrder:
    """A request for one order; the same request gives the same orders in every process.

    Attributes:
        spec: what is asked for, with ``times`` if passes were measured.
        again: the request for measured costs, whose order is taken if it is faster under them.
        asked: the cap that the options of ``spec`` were chosen for; ``free``: by ``auto``.
    """

    spec: ScheduleSpec
    again: ScheduleSpec | None = None
    asked: Cap | None = None
    free: bool = False

    def searched(self) -> Schedule:
        """The best order that is found in the time of ``spec.effort``.

        Raises:
            CapExceeded: it does not keep the cap.
            ValueError: it does not exist.
        """
        former = self._answer(self.spec, self.asked).schedule
        return former if self.again is None else self._replanned(former, self.again)

    def _time(self, schedule: Schedule) -> Fraction:
        return simulate(schedule).makespan

    def _answer(self, spec: ScheduleSpec, cap: Cap | None = None) -> Selected:
        try:
            return select_within(spec, cap, self.free)
        except CapExceeded as error:
            # Measured times may be off, and training has begun: what comes closest will do.
            if spec.offload is not None:
                return error.selected
            raise

    def _replanned(self, former: Schedule, again: ScheduleSpec) -> Schedule:
        """``former``, or the order for measured costs if that is faster under them."""
        new, refused = former, ""
        try:
            new = self._answer(again).schedule
        except ValueError as error:
            # Training has begun, and what it runs now is no worse than it was.
            refused = f"; {error}"
        gain = float(1 - self._time(new) / self._time(former))
        if gain > 0:
            return replace(new, note=f"re-planned for measured times: {gain:.2%} less time a step")
        than = f"{-gain:.2%} longer" if gain else "as long"
        note = f"the order stays: made for measured times it would take {than}{refused}"
        return replace(former, note=note)
