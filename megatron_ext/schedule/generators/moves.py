"""Single moves in an order, evaluated exactly: what a local search is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..actions import Action, Op, RankActions
from ..effects import DEVICE
from ..event_loop import Lane, Program, Row, run
from .request import Request

_FAR = 6  # places that a pass moves at most
_MOVE = 2  # work: a move costs as much as to place two passes in an order,
_RUN = 8  # and timing eight passes as placing one


class _Fixed(NamedTuple):
    """What moves do not change.

    Attributes:
        work: per rank, the time of its passes.
        passes: of all ranks.
        mirrored: by slot, the lane with time running backwards: it needs what needed it.
        need_rank: by slot of a lane, the rank of what it needs.
    """

    work: list[int]
    passes: int
    mirrored: dict[int, Lane]
    need_rank: dict[int, int]

    @classmethod
    def of(cls, program: Program, rows: Sequence[Row]) -> _Fixed:
        ranks = {lane.gives: rank for rank, row in enumerate(rows) for lane, _ in row}
        lanes = {lane.gives: lane for row in rows for lane, _ in row}
        # A W stands after its B anyway.
        after = {lane.need: lane for (op, _), lane in program.lanes.items() if op is not Op.W}
        mirrored = {}
        for gives, lane in lanes.items():
            need, latency = -1, 0
            if gives in after:
                need, latency = after[gives].gives, after[gives].latency
            mirrored[gives] = Lane(lane.took, need, latency, gives)
        return cls(
            [sum(lane.took for lane, _ in row) for row in rows],
            sum(map(len, rows)),
            mirrored,
            {gives: ranks[lane.need] for gives, lane in lanes.items() if lane.need >= 0},
        )


class _Timed(NamedTuple):
    """An order's times.

    Attributes:
        makespan: of it.
        ends: by slot, of the passes.
        paths: by slot, the longest path from the pass's start to the order's end.
    """

    makespan: int
    ends: list[int]
    paths: list[int]


class Moves:
    """An order under a memory cap that changes by one pass at a time.

    A move is first estimated from the longest paths to and from the passes that change places
    (Balas and Vazacopoulos, Management Science 1998); only what seems good enough is timed.

    Args:
        request: placement, microbatches and durations; what counts is the makespan.
        cap: most activation sets on a rank, counted from F's start to W's end.
        orders: to begin with; each (op, stage) by microbatch.

    Attributes:
        best, best_time: the fastest order so far.
        work: passes timed, and moves estimated.
    """

    def __init__(self, request: Request, cap: int, orders: RankActions) -> None:
        program = Program(request.placement, request.durations, request.microbatches)
        self.cap = cap
        self._orders = [list(row) for row in orders]
        self._rows: list[Row] = [program.row(row) for row in orders]
        self._fixed = fixed = _Fixed.of(program, self._rows)
        # The same order backwards in time: ends there are the longest paths from a pass's start.
        self._back: list[Row] = [
            [(fixed.mirrored[lane.gives], j) for lane, j in reversed(row)] for row in self._rows
        ]
        self._place = [0] * program.pass_slots
        self._held = [[0] * len(row) for row in self._rows]  # sets after every pass
        for rank, row in enumerate(self._rows):
            self._index(rank, 0, len(row) - 1)
        self._critical: list[tuple[int, int]] = []
        self._timed = _Timed(0, [], [])
        self.work = 0
        accepted = self._accepted(None)
        assert accepted
        self.best_time, self.best = self.time, orders

    @property
    def time(self) -> int:
        """Of the present order."""
        return self._timed.makespan

    def move(self, below: Callable[[int], int], worse: int) -> bool:
        """Move one pass, half of the time one of a critical path; undone if that cannot run, or
        makes the order slower by more than ``worse``.

        Args:
            below: a random number below its argument.
            worse: in units of the durations.
        """
        self.work += _MOVE
        if below(2):
            rank, here = self._on_critical_path(below)
        else:
            rank = below(len(self._rows))
            here = below(len(self._rows[rank]))
        there = here + below(2 * _FAR + 1) - _FAR
        order, row = self._orders[rank], self._rows[rank]
        if here == there or not 0 <= there < len(order) or not _may_pass(order, here, there):
            return False
        low, high = min(here, there), max(here, there)
        # An F to an earlier place, or a W to a later one: a set is held longer.
        held, op = self._held[rank], order[here].op
        if op is Op.F and here == high and max(held[max(low - 1, 0) : high]) >= self.cap:
            return False
        if op is Op.W and here == low and max(held[low + 1 : high + 1]) >= self.cap:
            return False
        _shift(row, here, there)
        limit = self.time + worse
        if self._estimate(row, low, high) <= limit:
            last = len(row) - 1
            _shift(self._back[rank], last - here, last - there)
            if self._accepted(limit):
                _shift(order, here, there)
                self._index(rank, low, high)
                if self.time < self.best_time:
                    self.best_time, self.best = self.time, [list(row) for row in self._orders]
                return True
            _shift(self._back[rank], last - there, last - here)
        _shift(row, there, here)
        return False

    def _index(self, rank: int, low: int, high: int) -> None:
        """Note what stands at the places ``low`` .. ``high``."""
        order, row, held = self._orders[rank], self._rows[rank], self._held[rank]
        sets = held[low - 1] if low else 0
        for place in range(low, high + 1):
            lane, j = row[place]
            self._place[lane.gives + j] = place
            sets += DEVICE.get(order[place].op, 0)
            held[place] = sets

    def _estimate(self, row: Row, low: int, high: int) -> int:
        """About how long the longest path through the passes ``low`` .. ``high`` is, which have
        changed places; the paths to and from all others are as before."""
        ends, paths, starts = self._timed.ends, self._timed.paths, []
        time = ends[row[low - 1][0].gives + row[low - 1][1]] if low else 0
        for place in range(low, high + 1):
            lane, j = row[place]
            if lane.need >= 0:
                time = max(time, ends[lane.need + j] + lane.latency)
            starts.append(time)
            time += lane.took
        path = most = 0
        if high + 1 < len(row):
            lane, j = row[high + 1]
            path = paths[lane.gives + j]
        for place in range(high, low - 1, -1):
            lane, j = row[place]
            back = self._fixed.mirrored[lane.gives]
            if back.need >= 0:
                path = max(path, paths[back.need + j] + back.latency)
            path += lane.took
            most = max(most, starts[place - low] + path)
        return most

    def _accepted(self, limit: int | None) -> bool:
        """Time the order; False if it cannot run within ``limit``."""
        slots, fixed = len(self._place), self._fixed
        slack = None if limit is None else [limit - work for work in fixed.work]
        self.work += fixed.passes // _RUN
        done = run(self._rows, slots, slack=slack)
        if done is None or any(at < len(row) for at, row in zip(done.at, self._rows)):
            return False
        time = max(done.clock)
        if limit is not None and time > limit:
            return False
        back = run(self._back, slots)
        assert back is not None
        self.work += fixed.passes // _RUN
        self._timed, self._critical = _Timed(time, done.ends, back.ends), []
        return True

    def _on_critical_path(self, below: Callable[[int], int]) -> tuple[int, int]:
        """Rank and place of a pass on a critical path."""
        if not self._critical:
            self._critical = self._critical_path()
        return self._critical[below(len(self._critical))]

    def _critical_path(self) -> list[tuple[int, int]]:
        ends = self._timed.ends
        lasts = [ends[row[-1][0].gives + row[-1][1]] for row in self._rows]
        rank = lasts.index(self.time)
        place = len(self._rows[rank]) - 1
        path = []
        while place >= 0:
            path.append((rank, place))
            lane, j = self._rows[rank][place]
            start = ends[lane.gives + j] - lane.took
            before, k = self._rows[rank][place - 1]
            if place and ends[before.gives + k] == start:
                place -= 1
            elif lane.need >= 0:
                rank, place = self._fixed.need_rank[lane.gives], self._place[lane.need + j]
            else:
                break
        return path


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
