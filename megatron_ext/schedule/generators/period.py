"""Steady states: one period of every rank, how long it takes at least, and better ones.

In the steady state a rank repeats the same passes for one later microbatch each period. The length
of the period is the largest ratio, over all circles of "has to wait for", of the time on the circle
to the number of periods it spans (a maximum cycle ratio, found exactly in integers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ..actions import Action, Op, RankActions
from ..costs import Durations
from ..effects import DEVICE, peak
from ..placement import Placement
from .cycles import Graph, Length, Row


@dataclass(frozen=True)
class Pattern:
    """The cyclic order of every rank: row[i] runs before row[i+1], the last before the next
    period's first."""

    placement: Placement
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, placement: Placement, interval: int, offsets: dict[tuple[Op, int], int]) -> Pattern:
        """The order in which a repeated block runs its passes."""
        rows = []
        for stages in placement.stages:
            here = sorted(
                (at % interval, op, s, at // interval)
                for (op, s), at in offsets.items()
                if s in stages
            )
            rows.append(tuple((op, s, lag) for _, op, s, lag in here))
        return cls(placement, tuple(rows))

    def stamp(self, microbatches: int) -> RankActions:
        """Every rank's passes of all microbatches in this order."""
        orders: RankActions = []
        for row in self.rows:
            first, last = min(lag for _, _, lag in row), max(lag for _, _, lag in row)
            order = [
                Action(op, s, n - lag)
                for n in range(first, microbatches + last)
                for op, s, lag in row
                if 0 <= n - lag < microbatches
            ]
            orders.append(order)
        return orders

    def peak(self) -> int:
        """Most activation sets on a rank in the steady state."""
        return max(row_peak(row) for row in self.rows)

    def period(self, durations: Durations) -> Fraction | None:
        """Length of one period; None if the order cannot run."""
        found = Graph(self.placement, self.rows, durations).length()
        return None if found is None else found.value


def row_peak(row: Row) -> int:
    """Most activation sets on a rank that repeats ``row``."""
    # Sets resident as a period begins: those whose F ran in an earlier one, but not their W.
    start = sum(-lag if op is Op.F else lag if op is Op.W else 0 for op, _, lag in row)
    return peak([DEVICE.get(op, 0) for op, _, _ in row], start)


def improve(pattern: Pattern, durations: Durations, cap: int, steps: int) -> Pattern:
    """A pattern with a shorter period under the same cap, by tabu search.

    Each step makes the best move that was not undone lately: one pass before or after its
    neighbours on the same rank, which may carry it into the next period. Deterministic.

    Args:
        pattern: where to start; its peak is at most ``cap``.
        durations: of the passes and hops.
        cap: most activation sets on a rank.
        steps: moves to make; each looks at all ranks.

    Returns:
        The best pattern seen; the given one if none is better.
    """
    graph = Graph(pattern.placement, pattern.rows, durations)
    now = graph.length()
    best, least = pattern, None if now is None else now.value
    seen = {pattern.rows}
    for _ in range(steps):
        if now is None or least is None or least <= graph.floor:
            break
        step = _best_move(graph, now, cap, seen)
        if step is None:
            break
        rank, row, now = step
        graph.swap(rank, row)
        seen.add(tuple(graph.rows))
        if now.value < least:
            least, best = now.value, Pattern(pattern.placement, tuple(graph.rows))
    return best


_Move = tuple[int, Row, Length]  # rank, its new row, what the period takes then


def _best_move(graph: Graph, now: Length, cap: int, seen: set[tuple[Row, ...]]) -> _Move | None:
    """The move to the shortest period, of those the one to the least memory, of those the first.

    Args:
        graph: as it is now; the same when this returns.
        now: its length.
        cap: most activation sets on a rank.
        seen: orders not to go back to.
    """
    rows = tuple(graph.rows)
    peaks = [row_peak(row) for row in rows]
    best: _Move | None = None
    key: tuple[Fraction, int] | None = None
    base, based = now, -1  # start times that nearly fit the next candidate; the rank they changed
    for rank, old in enumerate(rows):
        seeds = graph.touched(rank)
        if based >= 0:
            seeds |= graph.touched(based)
        rest = sum(peaks) - peaks[rank]
        for row in _moves(old, cap):
            if (*rows[:rank], row, *rows[rank + 1 :]) in seen:
                continue
            memory = rest + row_peak(row)
            if key is not None and memory >= key[1] and graph.floor >= key[0]:
                continue
            graph.swap(rank, row)
            length = _length(graph, base, seeds, known=key is not None)
            if length is not None and (key is None or (length.value, memory) < key):
                key, best = (length.value, memory), (rank, row, length)
                base, based = length, rank
            graph.swap(rank, old)
    return best


def _length(graph: Graph, base: Length, seeds: set[int], *, known: bool) -> Length | None:
    """Length of the graph's period, from that of one that differs in a row or two; with ``known``
    None where it is longer than that. None also if the order cannot run."""
    far = list(base.far)
    found = graph.relax(far, seeds, base.value)
    if found is not None:
        _, time, periods = found
        # Most candidates of a search are worse: that takes one look.
        return None if known or periods <= 0 else graph.length(Fraction(time, periods))
    if base.circle and graph.ratio(base.circle) == base.value:
        return Length(base.value, far, base.circle)
    return graph.length()


def _moves(row: Row, cap: int) -> Iterator[Row]:
    made = {row}
    for i in range(len(row)):
        for far in (1, 2):
            other = _moved(row, i, far)
            if other not in made and row_peak(other) <= cap:
                made.add(other)
                yield other


def _moved(row: Row, index: int, far: int) -> Row:
    """``row`` with its entry ``index`` moved ``far`` places later, around the end if need be."""
    op, stage, lag = row[index]
    rest = [*row[:index], *row[index + 1 :]]
    to = index + far
    if to > len(rest):
        # Past the end: one period later, i.e. one microbatch less far behind.
        to, lag = to - len(rest) - 1, lag + 1
        if to == 0:
            rest.insert(0, (op, stage, lag))
            return tuple(rest)
    rest.insert(to, (op, stage, lag))
    return tuple(rest)
