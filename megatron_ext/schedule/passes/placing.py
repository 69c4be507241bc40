"""Placement of a rank's copies on its host link, for chosen sets: no pass ever waits for them.

H2D from the right, as late as they can; D2H from the left, as early as they can (PipeOffload,
section 4.2; there on fixed slots of one stream, here with a stream for each direction).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..actions import Action, Op


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
    """One attempt to place the copies of ``chosen``, all of one rank.

    Args:
        chosen: sets of the rank.
        passes: of the rank.

    Attributes:
        placed: sets with a place for both copies.
        full: sets without one because the link is taken.
        short: sets without one because they are needed before both copies can end.
    """

    def __init__(self, chosen: Sequence[ActivationSet], passes: Passes) -> None:
        self.placed: list[Placed] = []
        self.full: list[ActivationSet] = []
        self.short: list[ActivationSet] = []
        self._passes = passes
        able: list[ActivationSet] = []
        for item in chosen:
            soonest, latest = item.saved_at, item.needed_at - item.h2d
            (able if self._place(item, soonest, latest) else self.short).append(item)
        found = _fit(able)
        for item in able:
            placed = self._place(item, *found[item.key]) if item.key in found else None
            if placed is None:
                self.full.append(item)
            else:
                self.placed.append(placed)

    def _place(self, item: ActivationSet, d2h: int, h2d: int) -> Placed | None:
        """The set with these starts of its copies; None if that frees no memory for any pass."""
        passes, evicted_at = self._passes, d2h + item.d2h
        release, prepare = passes.behind(evicted_at), min(passes.point(h2d), item.b)
        if evicted_at > h2d or release >= prepare:
            return None
        return Placed(item, d2h, h2d, release, prepare)

    def actions(self) -> list[tuple[int, Action]]:
        """(position, offload action) of the rank: before the pass at that position, in order."""
        timed: list[tuple[int, int, int, Action]] = []
        for item, d2h, h2d, release, prepare in self.placed:
            stage, j = item.key
            leave = max(self._passes.point(d2h), item.f + 1)
            # At one position in the order of time; what frees memory goes first.
            timed.append((release, d2h + item.d2h, 0, Action(Op.RELEASE, stage, j)))
            timed.append((prepare, h2d, 1, Action(Op.PREPARE, stage, j)))
            timed.append((prepare, h2d, 2, Action(Op.RELOAD, stage, j)))
            timed.append((leave, d2h, 3, Action(Op.OFFLOAD, stage, j)))
        return [(position, action) for position, _, _, action in sorted(timed)]


def _fit(items: Sequence[ActivationSet]) -> dict[tuple[int, int], tuple[int, int]]:
    """(start of D2H, start of H2D) by set: H2D from the right, as late as they can, then D2H from
    the left, as early as they can."""
    back: dict[tuple[int, int], int] = {}
    end: int | None = None
    for item in sorted(items, key=lambda s: (-s.needed_at, s.stage, s.microbatch)):
        start = (item.needed_at if end is None else min(end, item.needed_at)) - item.h2d
        if start >= item.saved_at + item.d2h:
            back[item.key] = end = start
    found: dict[tuple[int, int], tuple[int, int]] = {}
    free: int | None = None
    for item in sorted(items, key=lambda s: (s.saved_at, s.stage, s.microbatch)):
        if item.key in back:
            start = item.saved_at if free is None else max(free, item.saved_at)
            if start + item.d2h <= back[item.key]:
                found[item.key], free = (start, back[item.key]), start + item.d2h
    return found
