"""One search for orders on the V placement under a memory cap, for any costs.

Sources feed one small pool, in turns: building blocks that fit the cap, list-scheduled for the
costs (start, steady state and end count, for they are scheduled as a whole); and walks from the
pool's orders, each step a list schedule of the last, forward and backward in time by turns. Forward
idle time gathers at the end, backward at the start (Valls, Ballestin and Quintanilla, EJOR 2005).
What annealings of the pool's orders find goes back to it, and flips (``flips``) end the search.
The sequence of trials is fixed, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import NamedTuple, TypeVar

from ..actions import RankActions
from ..costs import Durations
from .annealing import anneal, fits, room_of
from .building_block import Block
from .flips import EACH, with_flips
from .list_scheduler import MinGap, list_schedule
from .request import Request

_T = TypeVar("_T")
_GAPS = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 3), Fraction(1, 4), Fraction(0))
_FIRST_GAPS = (Fraction(3, 4), Fraction(1, 2), Fraction(1))  # the likely best first
START_GAPS = (*_FIRST_GAPS, Fraction(0))
_POOL = 6  # orders
_AHEAD = 6  # blocks that are tried with few microbatches before the best goes on
_WALK = 40  # list schedules, each of the one before
_NOISES = (2, 4, 8, 16)  # of 64: how far a walk's durations are varied
_VARIED = 5  # ranks with a gap of their own, at most
# Heat of annealings of the best order, and of others, times the root of the passes: the more passes
# an order has, the fewer of all moves an annealing tries, and the colder it has to be.
_HEATS = (4, 7)
_FLIPS = 0.3  # share of what is annealed
_WORTH = 4  # flips at least, or none
_ROUNDS = 10  # turns of the walks and the annealings, at most
_ROUND = 200  # least work of one, times the passes
# Moves of a pass in all annealings, at least: fewer spoil more of a steady state than they gain.
_MOVES = 8.1
_LEAST = 3  # orders that any search makes
_CALL = 150  # work: a list schedule of no pass costs as much as to place so many


class Found(NamedTuple):
    """One order, and how long it takes under the search's request."""

    time: int
    orders: RankActions


class Search:
    """Orders for ``request`` under ``cap``, best first in ``pool``.

    Args:
        request: placement, microbatches and durations.
        cap: most activation sets on a rank.
        starts: orders under the cap to begin with.
        blocks: finds those that fit the cap, the likely best first.
        others: more orders under the cap, made after the first blocks if there is time.
        enough: a time that no order beats.
        model: ranks' orders; no rank takes more bytes than the fullest of these, however much
            larger a set is between B and W. None: no limit but the cap.
    """

    def __init__(
        self,
        request: Request,
        cap: int,
        starts: Sequence[RankActions],
        blocks: Callable[[], Sequence[Block]],
        others: Iterable[RankActions],
        enough: Fraction,
        model: RankActions | None = None,
    ) -> None:
        self.request, self.cap, self.enough = request, cap, enough
        self.room = room_of(model, cap) if model else None
        self.work = 0  # passes placed
        self.pool: list[Found] = []
        self._seen: set[int] = set()
        self._random = Random(1).random
        self._turn = 0  # annealings so far
        self._sources = [self._blocks(blocks), self._given(others), self._walked()]
        for number, orders in enumerate(starts):
            if orders in starts[:number]:
                continue
            self._add(orders)
            for gap in START_GAPS:
                self._list(orders, gap)

    def add(self, more: Iterable[RankActions]) -> None:
        """Orders under the cap that are candidates as they are."""
        for orders in more:
            if self._ended():
                break
            self._add(orders)

    def search(self, work: int) -> None:
        """Walk for ``work`` passes and anneal for as many, by turns, and end with flips."""
        passes = sum(map(len, self.pool[0].orders))
        work = max(work, passes * _LEAST)
        flips = int(work * _FLIPS)
        if flips < _WORTH * EACH * passes or self.request.objective != "makespan":
            flips = 0
        rounds = max(1, min(_ROUNDS, work // (_ROUND * passes)))
        for part in range(1, rounds + 1):
            self.run(work * part // rounds)
            if work >= _MOVES * passes:
                self.anneal((work - flips) // rounds)
        request, cap, enough = self.request, self.cap, self.enough
        best = self.pool[0].orders
        self.add([with_flips(request, cap, best, flips, enough, self._random, self.room)])

    def run(self, work: int) -> None:
        """Try orders until ``work`` passes were placed, or no better order can be."""
        while self.work < work and self._sources and not self._ended():
            for source in list(self._sources):
                if next(source, None) is None:
                    self._sources.remove(source)

    def anneal(self, work: int) -> None:
        """Add what an annealing finds: by turns of the best order, and, hotter, of another."""
        turn, self._turn = self._turn, self._turn + 1
        orders = self.pool[0].orders
        if turn % 2:
            orders = self.pool[turn // 2 % len(self.pool)].orders
        self.add([self.annealed(self.request, orders, work, _HEATS[turn % 2])])

    def annealed(
        self, request: Request, orders: RankActions, work: int, heat: int = _HEATS[0]
    ) -> RankActions:
        """``orders`` annealed; as they are for another objective than the makespan."""
        if request.objective != "makespan":
            return orders
        hot = heat / sum(map(len, orders)) ** 0.5
        return anneal(request, self.cap, orders, work, hot, self.enough, self._random, self.room)

    def fits(self, orders: RankActions) -> bool:
        """True if ``orders``, which keep the cap, take no more room between B and W."""
        return self.room is None or fits(orders, self.room)

    def _ended(self) -> bool:
        return bool(self.pool) and self.pool[0].time <= self.enough

    def _add(self, orders: RankActions) -> None:
        """Put ``orders`` into the pool if it is among the best."""
        request = self.request
        self.work += sum(map(len, orders)) // 4
        taken = request.time_of(orders)
        assert taken is not None
        if len(self.pool) < _POOL or taken < self.pool[-1].time:
            key = hash(tuple(tuple(row) for row in orders))
            if key not in self._seen and self.fits(orders):
                self._seen.add(key)
                self.pool = sorted([*self.pool, Found(taken, orders)], key=lambda one: one.time)
                del self.pool[_POOL:]

    def _list(
        self,
        orders: RankActions,
        gaps: Fraction | Sequence[MinGap],
        durations: Durations | None = None,
        *,
        backward: bool = False,
    ) -> RankActions:
        request = self.request
        self.work += sum(map(len, orders)) + _CALL
        durations = durations or request.durations
        listed = list_schedule(
            orders, request.placement, self.cap, durations, gaps, backward=backward
        )
        self._add(listed)
        return listed

    def _blocks(self, find: Callable[[], Sequence[Block]]) -> Iterator[bool]:
        """The blocks, those first that do best for half the microbatches."""
        request, number, blocks = self.request, 0, find()
        half = replace(request, microbatches=-(-request.microbatches // 2))
        waiting: list[tuple[int, int]] = []
        while number < len(blocks) or waiting:
            ahead = range(number, min(number + _AHEAD, len(blocks)))
            for number in ahead:
                block = blocks[number]
                orders = list_schedule(
                    block.stamp(half.microbatches),
                    block.placement,
                    self.cap,
                    half.durations,
                    _FIRST_GAPS[0],
                )
                self.work += sum(map(len, orders)) + _CALL
                taken = half.time_of(orders)
                assert taken is not None
                waiting.append((taken, number))
            number = ahead.stop
            waiting.sort(reverse=True)
            _, best = waiting.pop()
            for gap in _FIRST_GAPS:
                self._list(blocks[best].stamp(request.microbatches), gap)
            yield True

    def _given(self, others: Iterable[RankActions]) -> Iterator[bool]:
        """All of ``others`` in one turn."""
        self.add(others)
        yield True

    def _walked(self) -> Iterator[bool]:
        """Walks from the pool's orders: list schedules forward and backward in time by turns, with
        gaps varied from walk to walk and on a few ranks, and durations."""
        request, draw = self.request, _Draw()
        while True:
            # Half of the walks begin with the best order.
            place = 0 if draw.below(2) else draw.below(len(self.pool))
            orders, backward = self.pool[place].orders, draw.below(2) > 0
            usual = draw.of(_GAPS) if draw.below(2) else _FIRST_GAPS[0]
            noise = draw.of(_NOISES)
            for step in range(_WALK):
                gaps: list[MinGap] = [(usual, usual)] * request.pp
                for _ in range(draw.below(_VARIED + 1)):
                    gaps[draw.below(request.pp)] = draw.of(_GAPS), draw.of(_GAPS)
                durations = draw.noisy(request.durations, noise)
                orders = self._list(orders, gaps, durations, backward=backward)
                backward = not backward
                if step % 4 == 3:
                    yield True


class _Draw:
    """Random choices, the same on every machine and Python."""

    def __init__(self) -> None:
        self._random = Random(3).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def of(self, values: Sequence[_T]) -> _T:
        return values[self.below(len(values))]

    def noisy(self, durations: Durations, most: int) -> Durations:
        f, b, w = (
            tuple(time * (64 - most + self.below(2 * most + 1)) for time in row)
            for row in durations[:3]
        )
        return Durations(f, b, w, 64 * durations.hop, durations.scale)
