"""The waiting graph of a periodic order.

Nodes are the passes (op, stage) of one period. An edge is "has to wait for": the next pass of the
rank, or the pass whose result is needed. It takes time and spans periods; the length of a period is
the largest ratio of both over all circles. Times are integers and ratios exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ..actions import Op
from ..costs import Durations
from ..effects import inputs
from ..placement import Placement

Entry = tuple[Op, int, int]  # (op, stage, lag): in period n it runs microbatch n - lag
Row = tuple[Entry, ...]
_KIND = {Op.F: 0, Op.B: 1, Op.W: 2}
_Way = tuple[int, int, int]  # an edge as its end sees it: from, time, periods


class Graph:
    """The waiting graph of ``rows``.

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
        self.feeds: list[list[tuple[int, int]]] = [[] for _ in range(3 * n)]  # (node, time)
        for op, kind in _KIND.items():
            for stage in range(n):
                node = kind * n + stage
                for other_kind, other in inputs(op, stage, n):
                    source = other_kind * n + other
                    away = placement.rank_of(other) != placement.rank_of(stage)
                    time = self.took[source] + (durations.hop if away else 0)
                    self.feeds[source].append((node, time))
        self._work = 0  # of the rank with most
        for row in rows:
            nodes = [_KIND[op] * n + stage for op, stage, _ in row]
            self._work = max(self._work, sum(self.took[node] for node in nodes))
            for node, (_, _, lag) in zip(nodes, row):
                self.lag[node] = lag
            for node, then in pairwise(nodes):
                self.after[node] = then
            self.after[nodes[-1]], self.wraps[nodes[-1]] = nodes[0], 1

    def unlink(self, source: tuple[Op, int], then: tuple[Op, int]) -> None:
        """Forget that ``then`` needs the result of ``source``."""
        a, b = (_KIND[op] * self.stages + stage for op, stage in (source, then))
        self.feeds[a] = [feed for feed in self.feeds[a] if feed[0] != b]

    def length(self) -> Fraction | None:
        """Length of a period; None if the order cannot run."""
        value = Fraction(self._work)  # no period is shorter
        while True:
            found = self._longer(value)
            if found is None:
                return value
            time, periods = found
            if periods <= 0:
                return None
            value = Fraction(time, periods)

    def _longer(self, value: Fraction) -> tuple[int, int] | None:
        """Time and periods of a circle that takes longer than periods of this length; None if there
        is none: then there are start times that respect all edges."""
        num, den = value.numerator, value.denominator
        took, lag, feeds, after, wraps = self.took, self.lag, self.feeds, self.after, self.wraps
        far = [0] * len(took)  # start times, in units of 1/denominator
        via: list[_Way | None] = [None] * len(far)
        queue = deque(range(len(far)))
        waiting = [True] * len(far)
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


def _circle(via: Sequence[_Way | None], u: int, v: int) -> tuple[int, int] | None:
    """Time and periods of the circle that the edge from u to v has closed, if it has."""
    node, way = u, via[u]
    while way is not None and node != v:
        node = way[0]
        way = via[node]
    if node != v:
        return None
    time = periods = 0
    way = via[v]
    while way is not None:
        time, periods = time + way[1], periods + way[2]
        if way[0] == v:
            return time, periods
        way = via[way[0]]
    return None
