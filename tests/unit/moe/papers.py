"""What MPipeMoE and MPMoE publish, to compare with. docs/12 quotes what tests print with it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

# Work of a strategy, forward and backward: GEMMs in units of b*H*M, all-to-alls and copies in b*M
# (MPipeMoE, table I, for H = 4M).
WORK = {
    "none": ((2, 2, 0), (4, 2, 0)),
    "s1": ((2, 2, 5), (4, 2, 5)),
    "s2": ((2, 2, 4), (4, 3, 4)),
    "s3": ((2, 2, 1), (5, 2, 1)),
    "s4": ((2, 2, 0), (5, 3, 0)),
}


def choose_strategy(gemm: float, exchange: float, copy: float) -> str:
    """The strategy whose slowest streams take least, the first of equals (MPipeMoE, equation 10).

    Args:
        gemm, exchange, copy: one chunk's time for each unit of ``WORK``.
    """
    units = gemm, exchange, copy
    return min(
        ("s1", "s2", "s3", "s4"),
        key=lambda name: sum(
            max(amount * unit for amount, unit in zip(work, units)) for work in WORK[name]
        ),
    )


def savings(hidden: int, ffn: int, experts: int, tokens: int, chunks: int) -> tuple[float, float]:
    """What reuse saves of the pipelined layer (phi), and of the one that is not pipelined.

    Equations 1 to 6 of MPipeMoE: one expert a device, top-1, Adam, ``tokens`` on each device.
    """
    states = 4 * (experts * hidden + 2 * hidden * ffn)
    activations = tokens * (4 * hidden + ffn)
    exchanged, middle = 2 * hidden * (chunks - 2) / chunks, ffn * (chunks - 1) / chunks
    reused = tokens * (exchanged + middle) if chunks > 1 else 0.0
    sequential = states + activations + tokens * (hidden + ffn)
    pipelined = states + 2 * activations
    return 2 * reused / pipelined, 1 - (pipelined - 2 * reused) / sequential


def closed_form_ms(chunks: int, dispatch: float, compute: float, combine: float) -> float:
    """One direction without copies and restores (MPMoE's paradigm 1).

    Args:
        chunks: all equal, at least 1.
        dispatch, compute, combine: milliseconds of one chunk's S, C and R.
    """
    if chunks == 1:
        return dispatch + compute + combine
    steady = (chunks - 2) * max(dispatch + combine, compute)
    return dispatch + max(dispatch, compute) + steady + max(combine, compute) + combine


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
