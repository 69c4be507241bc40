"""Single moves in an order, evaluated exactly: what a local search is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..actions import Action, Op, RankActions
from ..effects import DEVICE
from ..event_loop import Program, Row, run
from .request import Request

_FAR = 6  # places that a pass moves at most


class Moves:
    """An order under a memory cap that changes by one pass at a time.

    Args:
        request: placement, microbatches and durations; what counts is the makespan.
        cap: most activation sets on a rank, counted from F's start to W's end.
        orders: to begin with; each (op, stage) by microbatch.

    Attributes:
        time: of the present order.
        best, best_time: the fastest order so far.
    """

    def __init__(self, request: Request, cap: int, orders: RankActions) -> None:
        program = Program(request.placement, request.durations, request.microbatches)
        self.cap, self._slots = cap, program.pass_slots
        self._orders = [list(row) for row in orders]
        self._rows: list[Row] = [program.row(row) for row in orders]
        self._work = [sum(lane.took for lane, _ in row) for row in self._rows]
        self._critical: list[tuple[int, int]] = []
        self.time = self.best_time = 0
        self._evaluate(None)
        self.best_time, self.best = self.time, orders

    def move(self, below: Callable[[int], int], worse: int) -> bool:
        """Move one pass, half of the time one of a critical path; undone if that cannot run, or
        makes the order slower by more than ``worse``.

        Args:
            below: a random number below its argument.
            worse: in units of the durations.
        """
        if below(2):
            rank, here = self._critical[below(len(self._critical))]
        else:
            rank = below(len(self._rows))
            here = below(len(self._rows[rank]))
        there = here + below(2 * _FAR + 1) - _FAR
        row = self._orders[rank]
        if here == there or not 0 <= there < len(row) or not _may_pass(row, here, there):
            return False
        _shift(row, here, there)
        if row[there].op is not Op.B and _peak(row) > self.cap:
            _shift(row, there, here)
            return False
        _shift(self._rows[rank], here, there)
        if not self._evaluate(self.time + worse):
            _shift(row, there, here)
            _shift(self._rows[rank], there, here)
            return False
        if self.time < self.best_time:
            self.best_time, self.best = self.time, [list(row) for row in self._orders]
        return True

    def _evaluate(self, limit: int | None) -> bool:
        """Time the order and find a critical path; False if it cannot run within ``limit``."""
        slack = None if limit is None else [limit - work for work in self._work]
        done = run(self._rows, self._slots, slack=slack)
        if done is None or any(at < len(row) for at, row in zip(done.at, self._rows)):
            return False
        time = max(done.clock)
        if limit is not None and time > limit:
            return False
        self.time = time
        where = {
            lane.gives + j: (rank, place)
            for rank, row in enumerate(self._rows)
            for place, (lane, j) in enumerate(row)
        }
        rank = done.clock.index(time)
        place = len(self._rows[rank]) - 1
        self._critical = path = []
        while place >= 0:
            path.append((rank, place))
            lane, j = self._rows[rank][place]
            start = done.ends[lane.gives + j] - lane.took
            before = self._rows[rank][place - 1]
            if place and done.ends[before[0].gives + before[1]] == start:
                place -= 1
            elif lane.need >= 0:
                rank, place = where[lane.need + j]
            else:
                break
        return True


def _shift(row: list[Action] | Row, here: int, there: int) -> None:
    row.insert(there, row.pop(here))  # type: ignore[arg-type]


def _may_pass(row: Sequence[Action], here: int, there: int) -> bool:
    """True if no pass in between is of the same lane, or of the same stage and microbatch."""
    op, stage, microbatch = row[here]
    between = row[here + 1 : there + 1] if there > here else row[there:here]
    return not any(
        other.stage == stage and (other.op is op or other.microbatch == microbatch)
        for other in between
    )


def _peak(row: Sequence[Action]) -> int:
    sets = most = 0
    for action in row:
        sets += DEVICE.get(action.op, 0)
        most = max(most, sets)
    return most
