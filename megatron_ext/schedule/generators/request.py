"""The request for one schedule, and the comparison of candidates for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from ..actions import RankActions
from ..costs import Durations
from ..event_loop import Program, run, time_of
from ..placement import Placement
from ..schedule import ScheduleError
from .list_scheduler import MinGap, list_schedule

Objective = Literal["makespan", "span"]
MOST_EFFORT = 3600  # seconds
EFFORT = "MEGATRON_EXT_EFFORT"  # a variable, for where no option gives it
Make = Callable[["Request"], RankActions]
_Way = tuple[Make, Sequence[MinGap] | None]  # with the gaps of a list schedule


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
        objective: ``makespan`` (first start to last end of all ranks) or ``span`` (the longest
            single rank's own span).
        group_size: of GIS; None for the schedule's own.
        memory_cap: most activation sets on a rank; None for the schedule's own.
        effort: seconds that a search may take, about; in units of work, so that every machine
            finds the same. 0: none, the name's order or one of few list schedules of it, at once.
        sets_grow: a set may be larger between B and W than before B (``generate``).
        every_microbatch: the steady state repeats the passes of one microbatch, not of several, as
            the insertion of vocabulary passes assumes.
    """

    placement: Placement
    microbatches: int
    durations: Durations
    objective: Objective = "makespan"
    group_size: int | None = None
    memory_cap: int | None = None
    effort: float = field(default_factory=default_effort)
    sets_grow: bool = False
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

    def time_of(self, orders: RankActions, limit: int | None = None) -> int | None:
        """How long ``orders`` take under this request's durations and objective; None if more
        than ``limit``."""
        return time_of(orders, self._program, span=self.objective == "span", limit=limit)

    def starts(self, orders: RankActions) -> list[list[int]]:
        """When every rank's passes start, in their order."""
        rows = [self._program.row(row) for row in orders]
        done = run(rows, self._program.pass_slots)
        assert done is not None  # only with slack
        return [[done.ends[lane.gives + j] - lane.took for lane, j in row] for row in rows]

    @property
    def _program(self) -> Program:
        return _program(self.placement, self.durations, self.microbatches)

    def fastest(self, candidates: Iterable[RankActions]) -> RankActions:
        """The candidate that takes least; the first of them if several do.

        Raises:
            ValueError: there is none.
        """
        best: RankActions | None = None
        least: int | None = None
        for orders in candidates:
            taken = self.time_of(orders, None if least is None else least - 1)
            if taken is not None:
                best, least = orders, taken
        if best is None:
            raise ValueError("no candidate order")
        return best

    def reordered_at_unit_times(self, orders: RankActions, cap: int | Sequence[int]) -> RankActions:
        """``list_schedule`` at equal times: the published way, blind to the costs."""
        return list_schedule(orders, self.placement, cap, Durations.unit(self.placement))

    def reordered(
        self, orders: RankActions, cap: int | Sequence[int], skip: int = 0
    ) -> Iterator[RankActions]:
        """``list_schedule`` for the costs, with as many kinds of gaps as there is time for.

        Nothing if the costs are equal and hops free: ``reordered_at_unit_times`` is the same then.

        Args:
            orders: as for ``list_schedule``.
            cap: as for ``list_schedule``.
            skip: how many of the kinds to leave out.
        """
        for gap in self._gaps[skip:]:
            yield list_schedule(orders, self.placement, cap, self.durations, gap)

    def shaped(self, makes: Sequence[Make], cap: int | Sequence[int]) -> RankActions:
        """The fastest of the first of ``makes``' orders and of list schedules of any of them.

        A long run tries two ways only, the first order and the fastest way for 4p microbatches: to
        make all ways in full takes seconds.
        """
        makes = [lru_cache(make) for make in (makes if self.effort else makes[:1])]
        ways: list[_Way] = [(makes[0], None)]
        ways += [(make, gap) for make in makes for gap in self._gaps]
        short = replace(self, microbatches=4 * self.pp + self.microbatches % self.pp)
        if self.is_long and short.microbatches < self.microbatches and len(ways) > 1:
            best = min(ways, key=lambda way: short.time_of(short._ordered(way, cap)) or 0)
            ways = ways[:1] if best is ways[0] else [ways[0], best]
        return self.fastest(self._ordered(way, cap) for way in ways)

    def _ordered(self, way: _Way, cap: int | Sequence[int]) -> RankActions:
        make, gap = way
        if gap is None:
            return make(self)
        return list_schedule(make(self), self.placement, cap, self.durations, gap)

    @property
    def _gaps(self) -> list[list[MinGap]]:
        if self.at_unit_times:
            return []
        # To wait gains nothing over the given order in the longest runs.
        first = 1 if self.passes > 2 * LONG else 0
        return min_gaps(self.pp)[first : 2 + bool(self.effort) * _THOROUGH // self.passes]


# Not an attribute of requests: caches of orders keep these, and would keep all programs' nodes.
_program = lru_cache(maxsize=4)(Program)


def min_gaps(pp: int) -> list[list[MinGap]]:
    """Least gaps to fill, rank by rank; the first two are 1 and 0 everywhere, the others the
    likely best first.

    A W in a gap shorter than itself delays the B that the rank waits for, and then all ranks
    that B goes to. That pays where it is the rank's own idle time that the makespan consists of,
    and costs where others wait; which of them it is depends on hop and costs. So both are tried,
    on the first ranks, on the last ones, for the whole run and for the cool-down alone.
    """
    ways: list[list[MinGap]] = [[(1, 1)] * pp, [(0, 0)] * pp]
    for last_ranks, quarters, share in _WAYS:
        # Four quarters are all ranks but one.
        count = pp - 1 if quarters == 4 else pp * quarters // 4
        whole: list[MinGap] = [(1, 1)] * (count if last_ranks else pp - max(1, count))
        other = [share] * (pp - len(whole))
        ways.append(whole + other if last_ranks else other + whole)
    return [way for number, way in enumerate(ways) if way not in ways[:number]]


_QUARTER, _HALF = Fraction(1, 4), Fraction(1, 2)
# The ranks with a least gap below 1: from so many quarters of them on, or those before; and that
# gap. In the order of how often each was the best over costs, hops, p and m.
_WAYS: tuple[tuple[bool, int, MinGap], ...] = (
    (True, 0, (1, 0)),
    (True, 3, (_QUARTER, _QUARTER)),
    (True, 2, (1, 0)),
    (False, 1, (1, 0)),
    (True, 4, (0, 0)),
    (True, 3, (1, 0)),
    (True, 2, (_QUARTER, _QUARTER)),
    (False, 2, (1, 0)),
    (True, 3, (_HALF, _HALF)),
    (True, 3, (1, _QUARTER)),
    (False, 2, (1, _QUARTER)),
    (True, 1, (1, 0)),
    (True, 4, (_QUARTER, _QUARTER)),
    (True, 2, (_HALF, _HALF)),
    (True, 0, (1, _QUARTER)),
    (True, 0, (1, _HALF)),
    (True, 0, (_HALF, _HALF)),
    (False, 1, (1, _QUARTER)),
    (True, 2, (0, 0)),
    (False, 3, (1, 0)),
    (True, 2, (1, _QUARTER)),
    (True, 4, (1, 0)),
    (False, 3, (1, _HALF)),
)
LONG = 30_000  # passes of an order that few ways are tried for
_THOROUGH = 30_000  # passes of all ways after the first two
