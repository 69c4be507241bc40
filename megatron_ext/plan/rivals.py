"""What searches of several divisions share: the points to beat, and orders for equal costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf

from ..schedule import Costs, Placement, Schedule, ScheduleSpec, select
from .memory import states_of
from .space import Workload


@dataclass
class Rivals:
    """Points of other searches that fit, in the times of this search's own points.

    Attributes:
        points: microseconds, and bytes on the fullest rank.
        units: orders for equal costs, of as many ranks.
        made: passes of the orders for equal costs that this search simulated.
    """

    points: Sequence[tuple[Fraction, int]] = ()
    units: dict[ScheduleSpec, Schedule] = field(default_factory=dict)
    made: int = 0

    @property
    def fastest(self) -> Fraction | float:
        """Microseconds of the fastest; infinite without one."""
        return min((time for time, _ in self.points), default=inf)

    def unit(self, spec: ScheduleSpec) -> Schedule:
        """The order for equal costs, of as many microbatches as its peak needs."""
        few = min(spec.microbatches, 2 * spec.pp)
        plain = replace(spec, cap=None, offload=None, barriers=0, overlap=False)
        key = replace(plain, microbatches=few, costs=Costs())
        if key not in self.units:
            self.units[key] = select(key).schedule
        return self.units[key]

    def beat(self, time: Fraction, size: int) -> bool:
        """One of them is as fast and as small."""
        return any(a <= time and b <= size for a, b in self.points)

    def leave_out(self, placement: Placement, work: Workload, bound: Fraction) -> bool:
        """True if no order of ``work`` is of interest, because none is faster than ``bound``."""
        if bound > self.fastest * _SLOWER:
            return True
        states = max(rank.total for rank in states_of(placement, work.stages))
        return self.beat(bound, states)


_SLOWER = Fraction(5, 4)  # than the fastest: of no interest for its memory either
