"""Steady states: one period of every rank, how long it takes at least, and better ones.

In the steady state a rank repeats the same passes for one later microbatch each period. The length
of the period is the largest ratio, over all circles of "has to wait for", of the time on the circle
to the number of periods it spans (a maximum cycle ratio, found exactly in integers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ..actions import Action, Op
from ..costs import Durations
from ..placement import Placement
from ..simulate import inputs
from .squeeze import SETS, Orders, duration

Entry = tuple[Op, int, int]  # (op, stage, lag): in period n it runs microbatch n - lag
Row = tuple[Entry, ...]
Edge = tuple[int, int, int, int]  # from, to, time, periods


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

    def stamp(self, microbatches: int) -> Orders:
        """Every rank's passes of all microbatches in this order."""
        orders: Orders = []
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

    def edges(self, durations: Durations) -> list[Edge]:
        """Who waits for whom: order on a rank, and data."""
        nodes = {(e[0], e[1]): i for i, e in enumerate(e for row in self.rows for e in row)}
        lags = {(op, s): lag for row in self.rows for op, s, lag in row}
        rank_of, n = self.placement.rank_of, self.placement.num_stages
        edges = []
        for row in self.rows:
            for i, (op, stage, lag) in enumerate(row):
                after, periods = (row[i + 1], 0) if i + 1 < len(row) else (row[0], 1)
                to = nodes[after[0], after[1]]
                edges.append((nodes[op, stage], to, duration(durations, op, stage), periods))
                for kind, other in inputs(op, stage, n):
                    producer = ((Op.F, Op.B)[kind], other)
                    hop = durations.hop if rank_of(other) != rank_of(stage) else 0
                    took = duration(durations, *producer) + hop
                    edges.append((nodes[producer], nodes[op, stage], took, lag - lags[producer]))
        return edges

    def period(self, durations: Durations, over: Fraction | None = None) -> Fraction | None:
        """Length of one period; None if the order cannot run, or if it exceeds ``over``."""
        edges = self.edges(durations)
        count = sum(len(row) for row in self.rows)
        # Most patterns that a search asks about are worse: that takes one look.
        if over is not None and _positive_circle(edges, count, over) is not None:
            return None
        # No period is shorter than the work of a rank.
        length = Fraction(max(sum(duration(durations, *e[:2]) for e in row) for row in self.rows))
        while True:
            circle = _positive_circle(edges, count, length)
            if circle is None:
                return length
            time, periods = circle
            if periods <= 0:
                return None
            length = Fraction(time, periods)


def row_peak(row: Row) -> int:
    """Most activation sets on a rank that repeats ``row``."""
    # Sets resident as a period begins: those whose F ran in an earlier one, but not their W.
    sets = 0
    for op, _, lag in row:
        sets += -lag if op is Op.F else lag if op is Op.W else 0
    peak = sets
    for op, _, _ in row:
        sets += SETS[op]
        peak = max(peak, sets)
    return peak


def _positive_circle(edges: list[Edge], count: int, length: Fraction) -> tuple[int, int] | None:
    """(time, periods) of a circle that takes longer than ``length`` a period; None if none does."""
    num, den = length.numerator, length.denominator
    weights = [(u, v, time * den - periods * num) for u, v, time, periods in edges]
    far = [0] * count
    via = [-1] * count
    for _ in range(count + 1):
        changed = -1
        for index, (u, v, weight) in enumerate(weights):
            if far[u] + weight > far[v]:
                far[v] = far[u] + weight
                via[v] = index
                changed = v
        if changed < 0:
            return None
        found = _circle_through(via, edges, changed)
        if found is not None:
            return found
    return None


def _circle_through(via: list[int], edges: list[Edge], node: int) -> tuple[int, int] | None:
    """(time, periods) of the circle that the ways to ``node`` end in, if they do."""
    seen = set()
    while via[node] >= 0 and node not in seen:
        seen.add(node)
        node = edges[via[node]][0]
    if via[node] < 0:
        return None
    start, time, periods = node, 0, 0
    while True:
        u, _, took, spans = edges[via[node]]
        time, periods, node = time + took, periods + spans, u
        if node == start:
            return time, periods


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
    best = now = pattern
    least = pattern.period(durations)
    floor = max(sum(duration(durations, op, s) for op, s, _ in row) for row in pattern.rows)
    seen = {pattern.rows}
    for _ in range(steps):
        if least is None or least <= floor:
            break
        ranked: tuple[Fraction, int, Pattern] | None = None
        for other in _neighbours(now, cap):
            if other.rows in seen:
                continue
            over = None if ranked is None else ranked[0]
            length = other.period(durations, over)
            if length is None:
                continue
            key = length, sum(row_peak(row) for row in other.rows)
            if ranked is None or key < ranked[:2]:
                ranked = (*key, other)
        if ranked is None:
            break
        now = ranked[2]
        seen.add(now.rows)
        if ranked[0] < least:
            least, best = ranked[0], now
    return best


def _neighbours(pattern: Pattern, cap: int) -> Iterator[Pattern]:
    for rank, row in enumerate(pattern.rows):
        made = {row}
        for i in range(len(row)):
            for far in (1, 2):
                other = _moved(row, i, far)
                if other not in made and row_peak(other) <= cap:
                    made.add(other)
                    rows = (*pattern.rows[:rank], other, *pattern.rows[rank + 1 :])
                    yield Pattern(pattern.placement, rows)


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
