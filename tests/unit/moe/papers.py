"""MPMoE's search for the number of chunks. docs/12 quotes what tests print with it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


def next_unimodal(candidates: Sequence[int], times: Mapping[int, float]) -> int | None:
    """Both ends, then inward from the better one until it gets worse (MPMoE, algorithm 1).

    Right if the times fall to their least and rise again. None: nothing left to try.
    """
    for end in (candidates[0], candidates[-1]):
        if end not in times:
            return end
    walk = list(candidates)
    if times[walk[-1]] < times[walk[0]]:
        walk.reverse()
    for here, there in pairwise(walk):
        if there not in times:
            return there
        if times[there] > times[here]:
            return None
    return None


class IntervalSearch:
    """MPMoE's search for n: n rises with the rows, and the times have one least.

    Rows between two of the same n need no trial, others only those between their neighbours' n.

    Args:
        candidates: of n, ascending.
        time: of a call, for n and rows.
    """

    def __init__(self, candidates: Sequence[int], time: Callable[[int, int], float]) -> None:
        self._candidates, self._time = candidates, time
        self._found: list[tuple[int, int]] = []  # rows and n, ascending
        self.trials = 0

    def choose(self, rows: int) -> int:
        """The n for calls of so many rows."""
        place = bisect_left(self._found, (rows, 0))
        if place < len(self._found) and self._found[place][0] == rows:
            return self._found[place][1]
        low = self._found[place - 1][1] if place > 0 else self._candidates[0]
        high = self._found[place][1] if place < len(self._found) else self._candidates[-1]
        low, high = min(low, high), max(low, high)
        between = [n for n in self._candidates if low <= n <= high]
        if len(between) == 1:
            return between[0]
        times: dict[int, float] = {}
        while (n := next_unimodal(between, times)) is not None:
            times[n] = self._time(n, rows)
            self.trials += 1
        best = min(times, key=lambda n: (times[n], n))
        insort(self._found, (rows, best))
        return best
