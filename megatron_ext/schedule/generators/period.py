"""Steady states: one period of every rank, and how long it takes at least.

In the steady state a rank repeats the same passes for one later microbatch each period. The length
of the period is the largest ratio, over all circles of "has to wait for", of the time on the circle
to the number of periods it spans (a maximum cycle ratio, found exactly in integers).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..actions import Action, Op, RankActions
from ..costs import Durations
from ..effects import DEVICE, peak
from ..placement import Placement
from .cycles import Graph, Row


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

    def period(self, durations: Durations) -> Fraction | None:
        """Length of one period; None if the order cannot run."""
        return Graph(self.placement, self.rows, durations).length()


def row_peak(row: Row) -> int:
    """Most activation sets on a rank that repeats ``row``."""
    # Sets resident as a period begins: those whose F ran in an earlier one, but not their W.
    start = sum(-lag if op is Op.F else lag if op is Op.W else 0 for op, _, lag in row)
    return peak([DEVICE.get(op, 0) for op, _, _ in row], start)
