"""One search for orders of a table under memory caps, for any durations.

List schedules of the bases, forward and backward in time, fill a small pool: forward idle time
gathers at the end, backward at the start (Valls, Ballestin and Quintanilla, EJOR 2005). Annealings
start from the pool's orders. The sequence of trials is fixed, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from random import Random
from typing import NamedTuple, TypeVar

from .engine import Rows, list_schedule, time_of
from .moves import Order, anneal
from .tasks import Tasks

_T = TypeVar("_T")
GAPS = (Fraction(3, 4), Fraction(1, 2), Fraction(1), Fraction(0))  # the likely best first
_POOL = 6  # orders
FINE = 64  # the durations of a table that is searched are multiples of this: noise stays exact
# Heat of annealings of the best order, and of others, times the root of the tasks: the more tasks
# an order has, the fewer of all moves an annealing tries, and the colder it has to be.
_HEATS = (4, 7)
_ROUNDS = 10  # annealings, at most
_ROUND = 200  # least work of one, times the tasks
# Moves of a task in all annealings, at least: fewer spoil more of a steady state than they gain.
_MOVES = 8
_LEAST = 3  # list schedules of any search
_CALL = 150  # work: a list schedule of no task costs as much as to place so many
_BASES = 3  # a third of a search is for bases


class Found(NamedTuple):
    """One order, and how long it takes."""

    time: int
    rows: Rows


class Search:
    """Orders of one table, best first in ``pool``.

    Args:
        tasks: the table.
        caps: of every rank.
        enough: a time that no order beats.
    """

    def __init__(
        self,
        tasks: Tasks,
        caps: Sequence[int],
        enough: Fraction | int = 0,
    ) -> None:
        self.tasks, self.caps, self.enough = tasks, caps, enough
        self.work = 0  # tasks placed
        self.pool: list[Found] = []
        self._seen: set[int] = set()
        self._random = Random(3).random  # the same on every machine and Python
        self._turn = 0  # annealings so far

    @property
    def ended(self) -> bool:
        """True if no order can be faster."""
        return bool(self.pool) and self.pool[0].time <= self.enough

    def run(self, bases: Iterable[Rows], work: int, more: Iterable[Rows] = ()) -> None:
        """List schedules of the bases, then annealings for about twice ``work`` tasks.

        Args:
            bases: orders that fit the caps.
            work: tasks placed; at least three list schedules are made.
            more: further bases, the likely best first, for a third of the work.
        """
        size = len(self.tasks.rank)
        work = max(work, size * _LEAST)
        for base in bases:
            self.start(base)
        for base in more:
            if self.ended or self.work > work // _BASES:
                break
            self.start(base)
        rounds = max(1, min(_ROUNDS, work // (_ROUND * size)))
        if work >= _MOVES * size:
            for _ in range(rounds):
                self._anneal(2 * work // rounds)

    def start(self, base: Rows, gaps: Sequence[Fraction] = GAPS) -> None:
        """Add a base, its list schedules, and of each of these one backward in time."""
        self.add(base)
        for gap in gaps:
            rows, usual = base, gap
            for backward in (False, True):
                if self.ended:
                    return
                self.work += len(self.tasks.rank) + _CALL
                rows = list_schedule(self.tasks, rows, self.caps, gap=usual, backward=backward)
                self.add(rows)
                usual = GAPS[0]

    def add(self, rows: Rows) -> None:
        """Put an order within the caps into the pool if it is among the best, and can run: a base
        whose passes wait for each other still says what comes first."""
        self.work += len(self.tasks.rank) // 4
        time = time_of(self.tasks, rows)
        if time is None:
            return
        if len(self.pool) == _POOL and time >= self.pool[-1].time:
            return
        key = hash(tuple(map(tuple, rows)))
        if key in self._seen:
            return
        self._seen.add(key)
        self.pool = sorted([*self.pool, Found(time, rows)], key=lambda one: one.time)[:_POOL]

    def time_of(self, rows: Rows) -> int:
        """Of what is made short, in the unit of the table."""
        time = time_of(self.tasks, rows)
        assert time is not None, "the order cannot run"
        return time

    def _anneal(self, work: int) -> None:
        """By turns of the best order, and, hotter, of another."""
        turn, self._turn = self._turn, self._turn + 1
        rows = self.pool[turn // 2 % len(self.pool) if turn % 2 else 0].rows
        self.anneal(rows, work, _HEATS[turn % 2])

    def anneal(self, rows: Rows, work: int, heat: float = _HEATS[0]) -> None:
        """Add the best order of one annealing of ``rows``."""
        if self.ended:
            return
        order = Order(self.tasks, rows, self.caps)
        hot = heat / len(self.tasks.rank) ** 0.5
        self.add(anneal(order, work, hot, self.enough, self._random))
