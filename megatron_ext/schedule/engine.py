"""Orders of the tasks of a table under a memory cap; nothing here knows what a pipeline is.

A *base* is an order of each rank's tasks that fits its cap, and that all ranks together can run
task by task. ``list_schedule`` makes a faster order of it, and never waits for ever:

1. Once what runs has ended, the rest of every rank fits its cap in the order of the base. A task
   that holds more memory at its end than before starts only if those before it in the base still
   fit behind it, one by one; those after it see the same level as before.
2. So the first task left of an order of all tasks that agrees with the bases has its inputs, comes
   first in its lane, and has nothing before it on its rank: it may start when its rank is free.
3. Only ``gap`` can hold it, as a rank may wait for a task that is expected. Where no rank has
   anything left to wait for, all choose once as if there were no gaps.

No duration was used. In reversed time take and give are exchanged, and peaks are the same.
"""

from __future__ import annotations

import copy
from bisect import insort
from collections.abc import Iterable, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from .tasks import Tasks

Rows = list[list[int]]  # tasks of every rank, in order


def one_by_one(tasks: Tasks) -> Rows:
    """One microbatch after the other, forward and back: a base for every cap that holds one."""
    lanes = range(tasks.lane[-1] + 1)
    place = {task: k for lane in lanes for k, task in enumerate(tasks.lane_order(lane))}
    missing = [len(edges) for edges in tasks.needs]
    rows: Rows = [[] for _ in range(tasks.placement.pp)]

    def item(task: int) -> tuple[int, int, int]:
        return tasks.microbatch[task % tasks.units], place[task], task

    ready = [item(task) for task, count in enumerate(missing) if not count]
    heapify(ready)
    while ready:
        task = heappop(ready)[-1]
        rows[tasks.rank[task]].append(task)
        for other, _ in tasks.feeds[task]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, item(other))
    return rows


def replay(tasks: Tasks, rows: Sequence[Sequence[int]]) -> list[int] | None:
    """When every task ends if each rank runs its row in order, as early as it can; None if ranks
    wait for each other in a circle."""
    ends = [-1] * len(tasks.rank)
    missing, ready = [len(edges) for edges in tasks.needs], [0] * len(ends)
    rank_of, duration, feeds = tasks.rank, tasks.duration, tasks.feeds
    at, clock = [0] * len(rows), [0] * len(rows)
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        row, time = rows[rank], clock[rank]
        for position in range(at[rank], len(row)):
            task = row[position]
            if missing[task]:
                break
            if time < ready[task]:
                time = ready[task]
            ends[task] = time = time + duration[task]
            at[rank] = position + 1
            for other, lag in feeds[task]:
                missing[other] -= 1
                if time + lag > ready[other]:
                    ready[other] = time + lag
                if not missing[other] and rank_of[other] != rank:
                    awake.append(rank_of[other])
        clock[rank] = time
    return ends if all(at[rank] == len(row) for rank, row in enumerate(rows)) else None


def earliest(tasks: Tasks) -> list[int]:
    """When each task starts if none ever waits for its rank."""
    apart = copy.copy(tasks)
    apart.rank = list(range(len(tasks.rank)))
    ends = replay(apart, [[task] for task in apart.rank])
    assert ends is not None  # no table has a circle
    return [end - took for end, took in zip(ends, tasks.duration)]


def list_schedule(
    tasks: Tasks,
    base: Rows,
    caps: Sequence[int],
    *,
    gap: Fraction | Sequence[Fraction] = Fraction(1),
    order: Rows | None = None,
    backward: bool = False,
) -> Rows:
    """A free rank starts the first task, in ``order``, that is ready and admitted.

    Args:
        tasks: the table.
        base: an order that fits; lanes keep theirs.
        caps: of every rank, in the unit of the table's sizes.
        gap: a task waits for one before it that may be ready within this share of its duration: 1
            never delays what comes first, 0 never waits. One, or one a rank.
        order: in which each rank prefers tasks; default ``base``.
        backward: from the last task to the first: idle time comes early then, not late.

    Raises:
        ValueError: the base needs more than the caps.
    """
    for rank, (peak, cap) in enumerate(zip(tasks.peaks(base), caps)):
        if peak > cap:
            raise ValueError(f"rank {rank}: the base holds {peak}, more than the cap of {cap}")
    if backward:
        tasks, base = tasks.backward(), [row[::-1] for row in base]
        order = None if order is None else [row[::-1] for row in order]
    gaps = [gap] * len(base) if isinstance(gap, Fraction) else gap
    rows = _Run(tasks, base, caps, gaps, base if order is None else order).rows()
    return [row[::-1] for row in rows] if backward else rows


class _Run:
    """One list schedule: what all ranks share."""

    def __init__(
        self,
        tasks: Tasks,
        base: Rows,
        caps: Sequence[int],
        gaps: Sequence[Fraction],
        order: Rows,
    ) -> None:
        self.tasks = tasks
        self.missing = [len(edges) for edges in tasks.needs]
        self.ready, self.ends = [0] * len(tasks.rank), [-1] * len(tasks.rank)
        self.ranks = [_Rank(self, *one) for one in zip(base, caps, gaps, order)]

    def rows(self) -> Rows:
        """Of every rank, as they started."""
        ranks, rank_of, feeds = self.ranks, self.tasks.rank, self.tasks.feeds
        missing, ready = self.missing, self.ready
        todo, now = len(rank_of), 0
        wakes = [(0, rank) for rank in range(len(ranks))]
        patient = True
        while todo:
            if not wakes:  # every rank waits for another one: none waits once
                assert patient, "the base cannot be run task by task"
                patient = False
                wakes = [(max(now, rank.clock), number) for number, rank in enumerate(ranks)]
                heapify(wakes)
            now, number = heappop(wakes)
            rank = ranks[number]
            if now < rank.clock:
                continue
            task = rank.choose(now, patient)
            while task is not None:
                patient, todo = True, todo - 1
                end = rank.start(task, now)
                for other, lag in feeds[task]:
                    missing[other] -= 1
                    time = end + lag
                    if time > ready[other]:
                        ready[other] = time
                    fed = rank_of[other]
                    if (fed != number or lag) and ranks[fed].clock <= time:
                        heappush(wakes, (time, fed))
                if not wakes or wakes[0][0] > end:  # nothing happens until then
                    now = end
                    task = rank.choose(now, patient)
                else:
                    heappush(wakes, (end, number))
                    break
        return [rank.row for rank in ranks]


class _Memory:
    """What one rank holds, and what it has still to hold in the order of its base."""

    def __init__(self, tasks: Tasks, base: list[int], cap: int) -> None:
        self._tasks, self._base, self._cap = tasks, base, cap
        self._place = {task: k for k, task in enumerate(base)}
        self._left, self._first = [True] * len(base), 0  # of the base: what has not started
        self._held = 0  # once what runs has ended
        self.growing = sum(tasks.take[task] > tasks.give[task] for task in base)

    def has_room(self, task: int) -> bool:
        """True if it fits, and what stands before it in the base fits behind it."""
        take, give, cap, held = self._tasks.take, self._tasks.give, self._cap, self._held
        held += take[task]
        if held > cap:
            return False
        held -= give[task]
        if held <= self._held:
            return True
        left, base = self._left, self._base
        for k in range(self._first, self._place[task]):
            if left[k]:
                other = base[k]
                held += take[other]
                if held > cap:
                    return False
                held -= give[other]
        return True

    def start(self, task: int) -> None:
        """Take it from the base."""
        left, first, most = self._left, self._first, len(self._left)
        left[self._place[task]] = False
        while first < most and not left[first]:
            first += 1
        self._first = first
        net = self._tasks.take[task] - self._tasks.give[task]
        self.growing -= net > 0
        self._held += net


class _Rank:
    """One rank of a run.

    Args:
        run: what it shares.
        base, cap, gap, order: its own.

    Attributes:
        clock: when it is free.
        row: what it has started.
    """

    def __init__(
        self, run: _Run, base: list[int], cap: int, gap: Fraction, order: Iterable[int]
    ) -> None:
        self._run, self._memory = run, _Memory(run.tasks, base, cap)
        self._gap = gap.as_integer_ratio()
        self._prefer = {task: k for k, task in enumerate(order)}
        self._lanes: dict[int, list[int]] = {}
        for task in reversed(base):
            self._lanes.setdefault(run.tasks.lane[task], []).append(task)
        # The next task of every lane, those that are preferred first.
        self._heads = sorted((self._prefer[lane[-1]], lane[-1]) for lane in self._lanes.values())
        self.clock, self.row = 0, list[int]()

    def choose(self, now: int, patient: bool) -> int | None:
        """What it starts now, if anything."""
        run, memory = self._run, self._memory
        missing, ready, tasks = run.missing, run.ready, run.tasks
        share, whole = self._gap
        soonest = -1  # when one that is preferred may be ready; negative: there is none
        spare: int | None = None
        for _, task in self._heads:
            if missing[task] or ready[task] > now:
                if share and patient:
                    expected = self._expected(task, now)
                    if (soonest < 0 or expected < soonest) and memory.has_room(task):
                        soonest = expected
            elif (
                soonest < 0 or (soonest - now) * whole >= share * tasks.duration[task]
            ) and memory.has_room(task):
                if memory.growing or tasks.feeds[task]:
                    return task
                if spare is None:  # nobody waits for it, and its memory is of no use any more
                    spare = task
        if spare is None or soonest < 0:
            return spare
        return spare if (soonest - now) * whole >= share * tasks.duration[spare] else None

    def _expected(self, task: int, now: int) -> int:
        """The earliest time at which it may be ready, as far as its own inputs say."""
        run, time = self._run, self._run.ready[task]
        ends, took = run.ends, run.tasks.duration
        for other, lag in run.tasks.needs[task]:
            if ends[other] < 0 and now + took[other] + lag > time:
                time = now + took[other] + lag
        return time

    def start(self, task: int, now: int) -> int:
        """Take it from its lane and from the base; when it ends."""
        tasks, heads, prefer = self._run.tasks, self._heads, self._prefer
        self.row.append(task)
        self._memory.start(task)
        heads.remove((prefer[task], task))
        lane = self._lanes[tasks.lane[task]]
        lane.pop()
        if lane:
            insort(heads, (prefer[lane[-1]], lane[-1]))
        self._run.ends[task] = self.clock = end = now + tasks.duration[task]
        return end
