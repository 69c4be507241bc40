"""The order that a training run follows for one number of microbatches, at once or after a search.

A search takes seconds. A run that meets a new number of microbatches goes on with a quick order in
the same memory, and searches beside its steps (``beside``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from .generators import GENERATORS, Request
from .memory_cap import Cap
from .named import CapExceeded, Selected, keeps, time_taken
from .schedule import Schedule
from .select import placed_alike, select
from .simulate import simulate
from .spec import AUTO, ScheduleSpec

# Passes of an order that is made in a tenth of a second, where no search is needed.
_FEW = 1000


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

    @property
    def is_quick(self) -> bool:
        """True if ``searched`` takes hardly longer than ``quick``."""
        spec = self.spec
        if spec.order is not None:
            return True
        chosen = (
            spec.overlap or spec.barriers or (spec.offload is not None and spec.cap is not None)
        )
        if chosen or self.again is not None:
            return False
        generator, placement = GENERATORS[spec.name], spec.placement
        if generator.fixed:
            return True
        if spec.has_units:
            return False
        request = Request(placement, spec.microbatches, spec.costs.durations(placement).reduced())
        if request.at_unit_times:
            return not generator.takes_memory_cap
        return generator.placement == "loop" and request.passes <= _FEW

    def searched(self) -> Schedule:
        """The best order that is found in the time of ``spec.effort``.

        Raises:
            CapExceeded: it does not keep the cap.
            ValueError: it does not exist.
        """
        former = self._answer(self.spec, self.asked).schedule
        return former if self.again is None else self._replanned(former, self.again)

    def quick(self) -> Schedule:
        """An order in the same memory, made in about a tenth of a second: no search, no pairs.

        Raises:
            CapExceeded: it does not keep the cap.
            ValueError: it does not exist.
        """
        spec = replace(self.spec, effort=0)
        if self.again is not None:
            spec = replace(spec, costs=self.again.costs)
        found = self._answer(spec, self.asked).schedule
        if self.measured is not None and not keeps(self.measured, found):
            return self.searched()
        return found

    def better(self) -> Schedule | None:
        """``searched``, or None if ``quick`` is as fast or alone keeps the cap."""
        try:
            found = self.searched()
        except ValueError:
            return None
        return found if self._time(found) < self._time(self.quick()) else None

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
