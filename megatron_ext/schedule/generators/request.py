"""What a schedule is asked for, and how fast candidates for it are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..costs import Durations
from ..placement import Placement
from .squeeze import Orders, squeeze, unit_durations
from .timing import time_of

Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Request:
    """One schedule to be made.

    Attributes:
        placement: where the stages lie.
        microbatches: m.
        durations: of every pass, in integers.
        objective: ``makespan`` (first start to last end of all ranks) or ``span`` (the longest
            single rank's own span).
        group_size: of GIS; None for the schedule's own.
        memory_cap: most activation sets on a rank; None for the schedule's own.
    """

    placement: Placement
    microbatches: int
    durations: Durations
    objective: Objective = "makespan"
    group_size: int | None = None
    memory_cap: int | None = None

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.pp

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        return self.placement.chunks

    @property
    def at_unit_times(self) -> bool:
        """True if all passes take the same time and a hop none: what fixed orders are made for."""
        d = self.durations
        times = {*d.forward, *d.backward_input, *d.backward_weight}
        return len(times) == 1 and d.hop == 0

    def time_of(self, orders: Orders, limit: int | None = None) -> int | None:
        """How long ``orders`` take under this request's durations and objective; None if more
        than ``limit``."""
        span = self.objective == "span"
        return time_of(orders, self.placement, self.durations, span=span, limit=limit)

    def fastest(self, candidates: Iterable[Orders]) -> Orders:
        """The candidate that takes least; the first of them if several do.

        Raises:
            ValueError: there is none.
        """
        best: Orders | None = None
        least: int | None = None
        for orders in candidates:
            taken = self.time_of(orders, None if least is None else least - 1)
            if taken is not None:
                best, least = orders, taken
        if best is None:
            raise ValueError("no candidate order")
        return best

    def unit_squeeze(self, orders: Orders, cap: int | Sequence[int]) -> Orders:
        """``squeeze`` at equal times: the published way, blind to the costs."""
        return squeeze(orders, self.placement, cap, unit_durations(self.placement))

    def squeezes(self, orders: Orders, cap: int | Sequence[int]) -> Iterable[Orders]:
        """``squeeze`` for the costs, patient (never delays what comes first) and greedy.

        Nothing if the costs are equal and hops free: ``unit_squeeze`` is the same then.
        """
        if self.at_unit_times:
            return
        patient = squeeze(orders, self.placement, cap, self.durations, 1)
        yield patient
        if len(orders) * len(orders[0]) <= _LONG:
            yield squeeze(orders, self.placement, cap, self.durations, 0)


_LONG = 30_000  # passes; above, one candidate less keeps generation under a second
