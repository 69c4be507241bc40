"""The request for one schedule, and the comparison of candidates for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

from ..actions import RankActions
from ..costs import Durations
from ..engine import Rows, list_schedule, time_of
from ..placement import Placement
from ..schedule import ScheduleError
from ..search import FINE, GAPS, Found, Search
from ..tasks import Tasks

MOST_EFFORT = 3600  # seconds
EFFORT = "MEGATRON_EXT_EFFORT"
LONG = 30_000  # passes of an order that few ways are tried for
THOROUGH = 15_000  # passes that a search places in a third of a second, about
Make = Callable[["Request"], RankActions]


def default_effort() -> float:
    """Seconds of search where none are asked for: the variable's, else 1.

    Raises:
        ScheduleError: the variable holds something else.
    """
    text = os.environ.get(EFFORT, "").strip() or "1"
    try:
        found = float(text)
    except ValueError:
        found = 0
    if not 0 < found <= MOST_EFFORT:
        raise ScheduleError(
            f"{EFFORT} must be more than 0 and at most {MOST_EFFORT} seconds, got {text!r}"
        )
    return found


@dataclass(frozen=True)
class Request:
    """One schedule to be made.

    Attributes:
        placement: rank and chunk of every stage.
        microbatches: m.
        durations: of every pass, in integers.
        group_size: of GIS; None for the schedule's own.
        memory_cap: most activation sets on a rank; None for the schedule's own.
        effort: seconds that a search may take, about; in units of work, so that every machine
            finds the same. 0: none, the name's order or one of few list schedules of it, at once.
        every_microbatch: the steady state repeats the passes of one microbatch, not of several, as
            the insertion of vocabulary passes assumes.
    """

    placement: Placement
    microbatches: int
    durations: Durations
    group_size: int | None = None
    memory_cap: int | None = None
    effort: float = field(default_factory=default_effort)
    every_microbatch: bool = False

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

    @property
    def passes(self) -> int:
        """F, B and W of the order."""
        return 3 * self.placement.num_stages * self.microbatches

    @property
    def is_long(self) -> bool:
        """True if there are so many of them that few ways are tried."""
        return self.passes > LONG

    @property
    def tasks(self) -> Tasks:
        """The table of its passes, for searches: durations are multiples of ``FINE``."""
        return _tasks(self.placement, self.durations, self.microbatches)

    def search(self, cap: int | Sequence[int], enough: Fraction | int = 0) -> Search:
        """A search for orders.

        Args:
            cap: activation sets, of all ranks or of each.
            enough: a time that no order beats, in the unit of the table.
        """
        return Search(self.tasks, self._caps(cap), enough)

    def listed(self, base: Rows, cap: int | Sequence[int]) -> Found:
        """The list schedule of a base that fits the cap."""
        return self.found(list_schedule(self.tasks, base, self._caps(cap), gap=Fraction(1)))

    def found(self, rows: Rows) -> Found:
        """An order with its time, in the unit of the table."""
        time = time_of(self.tasks, rows)
        assert time is not None, "the order cannot run"
        return Found(time, rows)

    def _caps(self, cap: int | Sequence[int]) -> Sequence[int]:
        return [cap] * self.pp if isinstance(cap, int) else cap

    def fastest(self, candidates: Iterable[RankActions]) -> RankActions:
        """The candidate that takes least; the first of them if several do."""
        tasks = self.tasks
        return min(candidates, key=lambda orders: self.found(tasks.rows(orders)).time)

    def listed_at_unit_times(self, orders: RankActions, cap: int | Sequence[int]) -> RankActions:
        """The list schedule at equal times: the published way, blind to the costs."""
        unit = replace(self, durations=Durations.unit(self.placement)).tasks
        return unit.actions(
            list_schedule(unit, unit.rows(orders), self._caps(cap), gap=Fraction(1))
        )

    def shaped(self, orders: Sequence[RankActions], cap: int | Sequence[int]) -> RankActions:
        """The fastest of ``orders``, of their list schedules under the cap, and of a short
        annealing where they have few passes; at equal times the first of them as it is."""
        if self.at_unit_times:
            return orders[0]
        search, bases = self.search(cap), map(self.tasks.rows, orders)
        if self.effort and not self.is_long:
            search.run(bases, THOROUGH)
        else:
            for base in bases:
                search.start(base, GAPS[-2:])
        return self.tasks.actions(search.pool[0].rows)


def fastest(*found: Found) -> Found:
    """The one that takes least; the first of them if several do."""
    return min(found, key=lambda one: one.time)


# Not an attribute of requests: caches of orders keep these, and would keep all tables.
@lru_cache(maxsize=4)
def _tasks(placement: Placement, durations: Durations, microbatches: int) -> Tasks:
    return Tasks(placement, durations.times(FINE, durations.scale), microbatches)
