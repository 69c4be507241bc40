"""Placement of a group's copies on its host links, for chosen sets: no pass ever waits for them.

H2D from the right, as late as they can; then D2H from the left, as early as they can, in what is
left (PipeOffload, section 4.2; there on fixed slots, here a grid only where that is better).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..actions import Action, Op

Uses = Callable[[int, bool], tuple[Hashable, ...]]


class ActivationSet(NamedTuple):
    """One chunk's activations of one microbatch, and the transfer times of their copies.

    ``f`` and ``b`` are the positions of its F and its B (or BW) among the rank's passes;
    ``saved_at`` is the end of the F, ``needed_at`` the start of the B.
    """

    rank: int
    stage: int
    microbatch: int
    f: int
    b: int
    saved_at: int
    needed_at: int
    d2h: int
    h2d: int

    @property
    def key(self) -> tuple[int, int]:
        """(stage, microbatch)"""
        return self.stage, self.microbatch

    @property
    def gap(self) -> int:
        """How long nobody needs it."""
        return self.needed_at - self.saved_at

    @property
    def travels(self) -> bool:
        """True if it has the time to go to the host and back."""
        return self.gap >= self.d2h + self.h2d


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
    """Starts of both copies of one set, and the positions between which it is on the host only."""

    item: ActivationSet
    d2h: int
    h2d: int
    release: int
    prepare: int


class Placing:
    """One attempt to place the copies of ``chosen``, all of one group of ranks.

    Args:
        chosen: sets of the group's ranks.
        passes: per rank.
        uses: what a copy of a rank has for itself, see ``Link.uses``.
        grid: align the copies placed first, so that the gaps left hold one of the others each.
        mirrored: D2H first, as early as they can, then H2D in what is left.
        slack: how much earlier than needed copies end; where others share what they use.

    Attributes:
        placed: sets with a place for both copies.
        full: sets without one because the link is taken.
        short: sets without one because they are needed before both copies can end.
    """

    def __init__(
        self,
        chosen: Sequence[ActivationSet],
        passes: dict[int, Passes],
        uses: Uses,
        grid: bool,
        mirrored: bool = False,
        slack: int = 0,
    ) -> None:
        self.placed: list[Placed] = []
        self.full: list[ActivationSet] = []
        self.short: list[ActivationSet] = []
        self._passes, self._slack = passes, slack
        able: list[ActivationSet] = []
        for item in chosen:
            soonest, latest = item.saved_at, item.needed_at - slack - item.h2d
            (able if self._place(item, soonest, latest) else self.short).append(item)
        if mirrored:
            found = _fit([_mirror(item, slack) for item in able], lambda r, h: uses(r, not h), grid)
            found = {
                item.key: (-found[item.key][1] - item.d2h, -found[item.key][0] - item.h2d)
                for item in able
                if item.key in found
            }
        else:
            found = _fit([i._replace(needed_at=i.needed_at - slack) for i in able], uses, grid)
        for item in able:
            placed = self._place(item, *found[item.key]) if item.key in found else None
            if placed is None:
                self.full.append(item)
            else:
                self.placed.append(placed)

    def _place(self, item: ActivationSet, d2h: int, h2d: int) -> Placed | None:
        """The set with these starts of its copies; None if that frees no memory for any pass."""
        passes = self._passes[item.rank]
        evicted_at = d2h + item.d2h + self._slack
        release, prepare = passes.behind(evicted_at), min(passes.point(h2d), item.b)
        if evicted_at > h2d or release >= prepare:
            return None
        return Placed(item, d2h, h2d, release, prepare)

    def actions(self, rank: int) -> list[tuple[int, Action]]:
        """(position, offload action) of one rank: before the pass at that position, in order."""
        passes = self._passes[rank]
        timed: list[tuple[int, int, int, Action]] = []
        for item, d2h, h2d, release, prepare in self.placed:
            if item.rank != rank:
                continue
            stage, j = item.key
            leave = max(passes.point(d2h), item.f + 1)
            # At one position in the order of time; what frees memory goes first.
            evicted_at = d2h + item.d2h + self._slack
            timed.append((release, evicted_at, 0, Action(Op.RELEASE, stage, j)))
            timed.append((prepare, h2d, 1, Action(Op.PREPARE, stage, j)))
            timed.append((prepare, h2d, 2, Action(Op.RELOAD, stage, j)))
            timed.append((leave, d2h, 3, Action(Op.OFFLOAD, stage, j)))
        return [(position, action) for position, _, _, action in sorted(timed)]


def _mirror(item: ActivationSet, slack: int) -> ActivationSet:
    """The same set with time reversed: leaving is coming back."""
    return item._replace(
        saved_at=slack - item.needed_at, needed_at=-item.saved_at, d2h=item.h2d, h2d=item.d2h
    )


def _fit(
    items: Sequence[ActivationSet], uses: Uses, grid: bool
) -> dict[tuple[int, int], tuple[int, int]]:
    """(start of D2H, start of H2D) by set: H2D from the right, then D2H from the left."""
    busy: dict[Hashable, list[tuple[int, int]]] = {}  # by H2D copies, latest first
    h2d_starts = _place_h2d(items, uses, busy, _grid(items) if grid and items else None)
    for rows in busy.values():
        rows.reverse()
    found: dict[tuple[int, int], tuple[int, int]] = {}
    tails: dict[Hashable, int] = {}
    places: dict[Hashable, int] = {}
    moved = [item for item in items if item.key in h2d_starts]
    for item in sorted(moved, key=lambda s: (s.saved_at, s.rank, s.stage, s.microbatch)):
        mine, h2d = uses(item.rank, True), h2d_starts[item.key]
        start = max(item.saved_at, *(tails.get(key, item.saved_at) for key in mine))
        start = _first_gap(start, item.d2h, mine, busy, places)
        if start + item.d2h > h2d:
            for key in uses(item.rank, False):
                busy[key].remove((h2d, h2d + item.h2d))
                places[key] = 0
            continue
        for key in mine:
            tails[key] = start + item.d2h
        found[item.key] = start, h2d
    return found


def _place_h2d(
    items: Sequence[ActivationSet],
    uses: Uses,
    busy: dict[Hashable, list[tuple[int, int]]],
    grid: _Grid | None,
) -> dict[tuple[int, int], int]:
    """Start of every set's H2D, as late as it can; fills ``busy``."""
    starts: dict[tuple[int, int], int] = {}
    for item in sorted(items, key=lambda s: (-s.needed_at, s.rank, s.stage, s.microbatch)):
        mine = uses(item.rank, False)
        end = item.needed_at
        for key in mine:
            rows = busy.get(key)
            if rows:
                end = min(end, rows[-1][0])
        if grid is not None and end <= grid.until:
            end -= (end - grid.shifts[item.rank]) % grid.period
        start = end - item.h2d
        if start >= item.saved_at + item.d2h:
            starts[item.key] = start
            for key in mine:
                busy.setdefault(key, []).append((start, end))
    return starts


def _first_gap(
    start: int,
    length: int,
    mine: Sequence[Hashable],
    busy: dict[Hashable, list[tuple[int, int]]],
    places: dict[Hashable, int],
) -> int:
    """The first time from ``start`` on at which ``length`` is free on all of ``mine``.

    ``places`` remembers where in ``busy`` the last search ended: starts never decrease.
    """
    moved = True
    while moved:
        moved = False
        for key in mine:
            rows = busy.get(key, ())
            at = places.get(key, 0)
            while at < len(rows) and rows[at][1] <= start:
                at += 1
            places[key] = at
            while at < len(rows) and rows[at][0] < start + length:
                start, moved = rows[at][1], True
                at += 1
    return start


class _Grid(NamedTuple):
    """Ends of H2D slots: every ``period`` from ``shifts[rank]`` on, up to ``until``."""

    period: int
    shifts: dict[int, int]
    until: int


def _grid(chosen: Sequence[ActivationSet]) -> _Grid:
    """One D2H and one H2D a period, as long as sets still leave; then H2D needs no gaps.

    The second rank of a pair is half a period behind the first, so that one of them sends while
    the other receives (PipeOffload, section 4.2).
    """
    ranks = sorted({item.rank for item in chosen})
    d2h, h2d = max(s.d2h for s in chosen), max(s.h2d for s in chosen)
    half = max(d2h, h2d)
    period = d2h + h2d if len(ranks) == 1 else 2 * half
    first = max(item.needed_at for item in chosen) % period
    until = max(item.saved_at for item in chosen) + period
    return _Grid(period, {rank: first + i * half for i, rank in enumerate(ranks)}, until)
