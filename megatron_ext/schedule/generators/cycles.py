"""The waiting graph of a periodic order, kept up to date while a search changes one row at a time.

Nodes are the passes (op, stage) of one period. An edge is "has to wait for": the next pass of the
rank, or the pass whose result is needed. It takes time and spans periods; the length of a period is
the largest ratio of both over all circles. Times are integers and ratios exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ..actions import Op
from ..costs import Durations
from ..effects import inputs
from ..placement import Placement

Entry = tuple[Op, int, int]  # (op, stage, lag): in period n it runs microbatch n - lag
Row = tuple[Entry, ...]
_KIND = {Op.F: 0, Op.B: 1, Op.W: 2}
_Way = tuple[int, int, int]  # an edge as its end sees it: from, time, periods


class Length(NamedTuple):
    """Length of a period, with its proof.

    Attributes:
        value: the length.
        far: for every node a start time, in units of 1/denominator of ``value``, that respects all
            edges at this length: nothing shorter than ``value`` is claimed by it.
        circle: nodes of a circle that takes this long; empty if it is the work of one rank.
    """

    value: Fraction
    far: list[int]
    circle: list[int]


class Graph:
    """The waiting graph of ``rows``; ``swap`` changes one of them.

    Args:
        placement: of the stages; every op of {F, B, W} and stage is in ``rows`` once.
        rows: one period of every rank.
        durations: of the passes and hops.
    """

    def __init__(self, placement: Placement, rows: Sequence[Row], durations: Durations) -> None:
        n = placement.num_stages
        self.stages = n
        self.took = [*durations.forward, *durations.backward_input, *durations.backward_weight]
        self.lag = [0] * (3 * n)
        self.after = [0] * (3 * n)  # next pass on the same rank
        self.wraps = [0] * (3 * n)  # 1 where that is in the next period
        self.before: list[list[int]] = [[] for _ in range(3 * n)]  # whose results it needs
        self.feeds: list[list[tuple[int, int]]] = [[] for _ in range(3 * n)]  # (node, time)
        for op, kind in _KIND.items():
            for stage in range(n):
                node = kind * n + stage
                for other_kind, other in inputs(op, stage, n):
                    source = other_kind * n + other
                    away = placement.rank_of(other) != placement.rank_of(stage)
                    time = self.took[source] + (durations.hop if away else 0)
                    self.before[node].append(source)
                    self.feeds[source].append((node, time))
        self.rows = list(rows)
        for rank in range(len(self.rows)):
            self.swap(rank, rows[rank])
        self.floor = max(sum(self.took[node] for node in self.nodes(row)) for row in rows)

    def nodes(self, row: Row) -> list[int]:
        """The nodes of one row, in order."""
        return [_KIND[op] * self.stages + stage for op, stage, _ in row]

    def swap(self, rank: int, row: Row) -> None:
        """Replace one rank's row by another order of the same passes."""
        nodes = self.nodes(row)
        for node, (_, _, lag) in zip(nodes, row):
            self.lag[node] = lag
        for node, then in pairwise(nodes):
            self.after[node], self.wraps[node] = then, 0
        self.after[nodes[-1]], self.wraps[nodes[-1]] = nodes[0], 1
        self.rows[rank] = row

    def unlink(self, source: tuple[Op, int], then: tuple[Op, int]) -> None:
        """Forget that ``then`` needs the result of ``source``."""
        a, b = (_KIND[op] * self.stages + stage for op, stage in (source, then))
        self.before[b].remove(a)
        self.feeds[a] = [feed for feed in self.feeds[a] if feed[0] != b]

    def touched(self, rank: int) -> set[int]:
        """Nodes with an outgoing edge that another row for this rank may change."""
        nodes = set(self.nodes(self.rows[rank]))
        return nodes.union(*(self.before[node] for node in nodes))

    def ratio(self, circle: Sequence[int]) -> Fraction:
        """Length that a circle of nodes forces, each waited for by the next."""
        time = periods = 0
        for node, then in zip(circle, [*circle[1:], circle[0]]):
            steps = [
                (took, self.lag[then] - self.lag[node])
                for other, took in self.feeds[node]
                if other == then
            ]
            if self.after[node] == then:
                steps.append((self.took[node], self.wraps[node]))
            if not steps:
                return Fraction(0)
            took, spans = max(steps, key=lambda step: (-step[1], step[0]))
            time, periods = time + took, periods + spans
        return Fraction(time, periods) if periods > 0 else Fraction(0)

    def length(self, least: Fraction | None = None) -> Length | None:
        """Length of a period; None if the order cannot run.

        Args:
            least: a length that it is known to have at least.
        """
        # No period is shorter than the work of a rank.
        value = Fraction(self.floor) if least is None else least
        circle: list[int] = []
        while True:
            far = [0] * len(self.took)
            found = self.relax(far, range(len(far)), value)
            if found is None:
                return Length(value, far, circle)
            circle, time, periods = found
            if periods <= 0:
                return None
            value = Fraction(time, periods)

    def relax(
        self, far: list[int], seeds: Iterable[int], value: Fraction
    ) -> tuple[list[int], int, int] | None:
        """Raise the start times ``far`` until they respect all edges at this length.

        Args:
            far: start times in units of 1/denominator of ``value``; changed in place.
            seeds: all nodes with an outgoing edge that ``far`` may not respect.
            value: the length of a period.

        Returns:
            None, or a circle that takes longer: (nodes, time, periods).
        """
        num, den = value.numerator, value.denominator
        took, lag, feeds, after, wraps = self.took, self.lag, self.feeds, self.after, self.wraps
        via: list[_Way | None] = [None] * len(far)
        queue = deque(seeds)
        waiting = [False] * len(far)
        for node in queue:
            waiting[node] = True
        while queue:
            u = queue.popleft()
            waiting[u] = False
            start, late = far[u], lag[u]
            edges = [(after[u], took[u], wraps[u])]
            edges += [(v, time, lag[v] - late) for v, time in feeds[u]]
            for v, time, periods in edges:
                at = start + time * den - periods * num
                if at > far[v]:
                    far[v] = at
                    via[v] = u, time, periods
                    circle = _circle(via, u, v)
                    if circle is not None:
                        return circle
                    if not waiting[v]:
                        waiting[v] = True
                        queue.append(v)
        return None


def _circle(via: Sequence[_Way | None], u: int, v: int) -> tuple[list[int], int, int] | None:
    """The circle that the edge from u to v has closed, if it has: (nodes, time, periods)."""
    node, way = u, via[u]
    while way is not None and node != v:
        node = way[0]
        way = via[node]
    if node != v:
        return None
    nodes, time, periods = [v], 0, 0
    way = via[v]
    while way is not None:
        time, periods = time + way[1], periods + way[2]
        if way[0] == v:
            return nodes[::-1], time, periods
        nodes.append(way[0])
        way = via[way[0]]
    return None
