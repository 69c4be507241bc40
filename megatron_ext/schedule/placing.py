"""Where a group's copies go on its links, for sets already chosen: no pass ever waits for them.

H2D from the right, as late as they can; then D2H from the left, as early as they can, in what is
left (PipeOffload, section 4.2; there on fixed slots, here a grid only where that is better).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import Action, Op

Uses = Callable[[int, bool], tuple[Hashable, ...]]


class Set_(NamedTuple):
    """One chunk's activations of one microbatch: when they are kept, how long they travel.

    ``f`` and ``b`` are the positions of its F and its B (or BW) among the rank's passes; ``kept``
    is the end of the F, ``needed`` the start of the B.
    """

    rank: int
    stage: int
    microbatch: int
    f: int
    b: int
    kept: int
    needed: int
    there: int
    back: int

    @property
    def key(self) -> tuple[int, int]:
        """(stage, microbatch)"""
        return self.stage, self.microbatch

    @property
    def gap(self) -> int:
        """How long nobody needs it."""
        return self.needed - self.kept


@dataclass(frozen=True)
class Passes:
    """When the passes of one rank run; times increase."""

    start: Sequence[int]
    end: Sequence[int]

    def point(self, time: int) -> int:
        """The last position that the computation has reached by ``time``: before pass i."""
        return min(bisect_right(self.end, time), len(self.end))

    def behind(self, time: int) -> int:
        """The first position whose pass does not start before ``time``."""
        return bisect_left(self.start, time)


class Placed(NamedTuple):
    """Start of both copies of one set, and the positions between which it is away."""

    item: Set_
    there: int
    back: int
    release: int
    prepare: int


class Placing:
    """One attempt to place the copies of ``chosen``, all of one group of ranks.

    Args:
        chosen: sets of the group's ranks.
        passes: per rank.
        uses: what a copy of a rank has for itself, see ``Link.uses``.
        grid: align H2D to slots, so that the gaps left between them hold a D2H each.
        slack: how much earlier than needed copies end; where others share what they use.

    Attributes:
        placed: what has found its place.
        full: what has not because the link is taken.
        short: what has not because it would be needed again before it were away.
    """

    def __init__(
        self,
        chosen: Sequence[Set_],
        passes: dict[int, Passes],
        uses: Uses,
        grid: bool,
        slack: int = 0,
    ) -> None:
        self.placed: list[Placed] = []
        self.full: list[Set_] = []
        self.short: list[Set_] = []
        self._passes, self._uses, self._slack = passes, uses, slack
        self._busy: dict[Hashable, list[tuple[int, int]]] = {}  # by H2D copies, latest first
        self._grid = _grid(chosen) if grid and chosen else None
        self._outward(chosen, self._homeward(chosen))

    def _homeward(self, chosen: Sequence[Set_]) -> dict[tuple[int, int], int]:
        """Start of every set's H2D."""
        starts: dict[tuple[int, int], int] = {}
        for item in sorted(chosen, key=lambda s: (-s.needed, s.rank, s.stage, s.microbatch)):
            if item.gap < item.there + item.back + 2 * self._slack:
                self.short.append(item)
                continue
            uses = self._uses(item.rank, False)
            end = item.needed - self._slack
            for key in uses:
                rows = self._busy.get(key)
                if rows:
                    end = min(end, rows[-1][0])
            if self._grid is not None and end <= self._grid.until:
                end -= (end - self._grid.shifts[item.rank]) % self._grid.period
            start = end - item.back
            if start < item.kept + item.there:
                self.full.append(item)
                continue
            starts[item.key] = start
            for key in uses:
                self._busy.setdefault(key, []).append((start, end))
        return starts

    def _outward(self, chosen: Sequence[Set_], homeward: dict[tuple[int, int], int]) -> None:
        for rows in self._busy.values():
            rows.reverse()
        tails: dict[Hashable, int] = {}
        places: dict[Hashable, int] = {}
        travelling = [item for item in chosen if item.key in homeward]
        for item in sorted(travelling, key=lambda s: (s.kept, s.rank, s.stage, s.microbatch)):
            uses, back = self._uses(item.rank, True), homeward[item.key]
            start = max(item.kept, *(tails.get(key, 0) for key in uses))
            start = self._first_gap(start, item.there, uses, places)
            passes = self._passes[item.rank]
            release = passes.behind(start + item.there + self._slack)
            prepare = min(passes.point(back), item.b)
            if start + item.there + self._slack > back or release >= prepare:
                whole = item.kept + item.there + self._slack
                last = min(passes.point(item.needed - item.back - self._slack), item.b)
                kind = self.short if passes.behind(whole) >= last else self.full
                kind.append(item)
                for key in self._uses(item.rank, False):
                    self._busy[key].remove((back, back + item.back))
                    places[key] = 0
                continue
            for key in uses:
                tails[key] = start + item.there
            self.placed.append(Placed(item, start, back, release, prepare))

    def _first_gap(
        self, start: int, length: int, uses: Sequence[Hashable], places: dict[Hashable, int]
    ) -> int:
        """The first time from ``start`` on at which ``length`` is free on all that is used."""
        moved = True
        while moved:
            moved = False
            for key in uses:
                rows = self._busy.get(key, ())
                at = places.get(key, 0)
                while at < len(rows) and rows[at][1] <= start:
                    at += 1
                while at < len(rows) and rows[at][0] < start + length:
                    start, moved = rows[at][1], True
                    at += 1
                places[key] = at
        return start

    def actions(self, rank: int) -> list[tuple[int, Action]]:
        """(position, offload action) of one rank: before the pass at that position, in order."""
        passes = self._passes[rank]
        timed: list[tuple[int, int, int, Action]] = []
        for item, there, back, release, prepare in self.placed:
            if item.rank != rank:
                continue
            stage, j = item.key
            leave = max(passes.point(there), item.f + 1)
            # At one position in the order of time; what frees memory goes first.
            gone = there + item.there + self._slack
            timed.append((release, gone, 0, Action(Op.RELEASE, stage, j)))
            timed.append((prepare, back, 1, Action(Op.PREPARE, stage, j)))
            timed.append((prepare, back, 2, Action(Op.RELOAD, stage, j)))
            timed.append((leave, there, 3, Action(Op.OFFLOAD, stage, j)))
        return [(position, action) for position, _, _, action in sorted(timed)]


class _Grid(NamedTuple):
    """Ends of H2D slots: every ``period`` from ``shifts[rank]`` on, up to ``until``."""

    period: int
    shifts: dict[int, int]
    until: int


def _grid(chosen: Sequence[Set_]) -> _Grid:
    """One D2H and one H2D a period, as long as sets still leave; then H2D needs no gaps.

    The second rank of a pair is half a period behind the first, so that one of them sends while
    the other receives (PipeOffload, section 4.2).
    """
    ranks = sorted({item.rank for item in chosen})
    there, back = max(s.there for s in chosen), max(s.back for s in chosen)
    half = max(there, back)
    period = there + back if len(ranks) == 1 else 2 * half
    first = max(item.needed for item in chosen) % period
    until = max(item.kept for item in chosen) + period
    return _Grid(period, {rank: first + i * half for i, rank in enumerate(ranks)}, until)
