"""The order that a training run follows for one number of microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from .memory_cap import Cap
from .named import CapExceeded, Selected, keeps, time_taken
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
        lenient: under offload, what comes closest to a cap will do.
        again: the request for measured costs, whose order is taken if it is faster under them.
        measured: a cap by measured bytes; what exceeds it is replaced even by a slower order.
        asked: the cap that the options of ``spec`` were chosen for; ``free``: by ``auto``.
    """

    spec: ScheduleSpec
    lenient: bool = False
    again: ScheduleSpec | None = None
    measured: Cap | None = None
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
        return time_taken(simulate(schedule), self.spec.objective)

    def _answer(self, spec: ScheduleSpec, cap: Cap | None = None) -> Selected:
        try:
            return select_within(spec, cap, self.free)
        except CapExceeded as error:
            if self.lenient and spec.offload is not None:
                return error.selected
            raise

    def _replanned(self, former: Schedule, again: ScheduleSpec) -> Schedule:
        """``former``, or the order for measured costs and bytes if that is better under them."""
        cap, new, fits, refused = self.measured, former, True, ""
        try:
            fits = cap is None or keeps(cap, former)
            new = self._answer(again).schedule
        except ValueError as error:
            # Training has begun, and what it runs now is no worse than it was.
            refused = f"; {'by measured bytes ' * (cap is not None)}{error}"
        gain = float(1 - self._time(new) / self._time(former))
        if gain > 0 or (not fits and not refused):
            time = f"{gain:.2%} less time" if gain >= 0 else f"{-gain:.2%} more time"
            why = "measured times" if fits else "measured bytes, which the former order exceeds"
            held = f"; {new.name}: {cap.detail(new)}" if cap is not None else ""
            return replace(new, note=f"re-planned for {why}: {time} a step{held}")
        than = f"{-gain:.2%} longer" if gain else "as long"
        note = f"the order stays: made for measured times it would take {than}{refused}"
        return replace(former, note=note)
