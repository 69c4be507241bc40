"""One search for orders of a table under memory caps, for any durations.

List schedules of the bases fill a small pool. Walks start from its orders: each step is a list
schedule of the last, forward and backward in time by turns, as forward idle time gathers at the
end, backward at the start (Valls, Ballestin and Quintanilla, EJOR 2005). Annealings of the pool's
orders take turns with them. The sequence of trials is fixed, so all ranks agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from fractions import Fraction
from random import Random
from typing import NamedTuple, TypeVar

from .engine import Rows, list_schedule, time_of
from .moves import Order, anneal
from .tasks import Tasks

_T = TypeVar("_T")
GAPS = (Fraction(3, 4), Fraction(1, 2), Fraction(1), Fraction(0))  # the likely best first
_MORE_GAPS = (*GAPS, Fraction(1, 3), Fraction(1, 4))
_POOL = 6  # orders
_TURNS = 1  # list schedules that follow that of a base and a gap, backward first
_WORTH = 60  # least work for which these are made, times the tasks
_FEW = 1000  # tasks; for no more they are always made
_WALK = 24  # list schedules, each of the one before
FINE = 64  # the durations of a table that is searched are multiples of this: noise stays exact
_NOISES = (0, 2, 4, 8, 16)  # of 64: how far a walk's durations are varied
_VARIED = 5  # ranks with a gap of their own, at most
# Heat of annealings of the best order, and of others, times the root of the tasks: the more tasks
# an order has, the fewer of all moves an annealing tries, and the colder it has to be.
_HEATS = (4, 7)
_ROUNDS = 10  # turns of the walks and the annealings, at most
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
        span: what counts is the longest single rank's own span, not the makespan.
    """

    def __init__(
        self,
        tasks: Tasks,
        caps: Sequence[int],
        enough: Fraction | int = 0,
        *,
        span: bool = False,
    ) -> None:
        self.tasks, self.caps, self.enough = tasks, caps, enough
        self.work = 0  # tasks placed
        self.pool: list[Found] = []
        self._span = span
        self._seen: set[int] = set()
        self._draw = _Draw()
        self._turn = 0  # annealings so far

    @property
    def ended(self) -> bool:
        """True if no order can be faster."""
        return bool(self.pool) and self.pool[0].time <= self.enough

    def run(self, bases: Iterable[Rows], work: int, more: Iterable[Rows] = ()) -> None:
        """List schedules of the bases, then walk for ``work`` tasks and anneal for as many, by
        turns.

        Args:
            bases: orders that fit the caps.
            work: at least three list schedules are made.
            more: further bases, the likely best first, for a third of the work.
        """
        size = len(self.tasks.rank)
        work = max(work, size * _LEAST)
        turns = _TURNS if work >= _WORTH * size or size <= _FEW else 0
        for base in bases:
            self.start(base, turns=turns)
        for base in more:
            if self.ended or self.work > work // _BASES:
                break
            self.start(base, turns=turns)
        rounds = max(1, min(_ROUNDS, work // (_ROUND * size)))
        for part in range(1, rounds + 1):
            self._walk(work * part // rounds)
            if work >= _MOVES * size and not self._span:
                self._anneal(work // rounds)

    def start(self, base: Rows, gaps: Sequence[Fraction] = GAPS, turns: int = 0) -> None:
        """Add a base and its list schedules; ``turns`` more follow each, the first one backward."""
        self.add(base)
        for gap in gaps:
            rows = base
            for turn in range(0 if self.ended else 1 + turns):
                usual = GAPS[0] if turn else gap
                rows = self._list(rows, [usual] * len(rows), backward=turn % 2 > 0)

    def add(self, rows: Rows) -> None:
        """Put an order within the caps into the pool if it is among the best, and can run: a base
        whose passes wait for each other still says what comes first."""
        self.work += len(self.tasks.rank) // 4
        time = time_of(self.tasks, rows, span=self._span)
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
        time = time_of(self.tasks, rows, span=self._span)
        assert time is not None, "the order cannot run"
        return time

    def _list(
        self,
        rows: Rows,
        gaps: Sequence[Fraction],
        durations: list[int] | None = None,
        *,
        backward: bool = False,
    ) -> Rows:
        tasks = self.tasks
        self.work += len(tasks.rank) + _CALL
        if durations is not None:
            tasks = copy.copy(tasks)
            tasks.duration = durations
        listed = list_schedule(tasks, rows, self.caps, gap=gaps, backward=backward)
        self.add(listed)
        return listed

    def _walk(self, work: int) -> None:
        """Walks from the pool's orders until ``work`` tasks are placed: gaps vary from walk to walk
        and on a few ranks, durations from step to step."""
        draw = self._draw
        while self.work < work and not self.ended:
            # Half of the walks begin with the best order.
            place = 0 if draw.below(2) else draw.below(len(self.pool))
            rows, backward = self.pool[place].rows, draw.below(2) > 0
            usual = draw.of(_MORE_GAPS) if draw.below(2) else GAPS[0]
            noise = draw.of(_NOISES)
            for _ in range(_WALK):
                gaps = [usual] * len(rows)
                for _ in range(draw.below(_VARIED + 1)):
                    gaps[draw.below(len(rows))] = draw.of(_MORE_GAPS)
                durations = draw.noisy(self.tasks, noise)
                rows = self._list(rows, gaps, durations, backward=backward)
                backward = not backward
                if self.work >= work or self.ended:
                    break

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
        self.add(anneal(order, work, hot, self.enough, self._draw.random))


class _Draw:
    """Random choices, the same on every machine and Python."""

    def __init__(self) -> None:
        self.random = Random(3).random

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def of(self, values: Sequence[_T]) -> _T:
        return values[self.below(len(values))]

    def noisy(self, tasks: Tasks, most: int) -> list[int]:
        """Durations that differ by up to ``most`` of 64 parts, the same ones in a lane."""
        parts = [FINE - most + self.below(2 * most + 1) for _ in range(tasks.lane[-1] + 1)]
        return [took * parts[lane] // FINE for took, lane in zip(tasks.duration, tasks.lane)]
