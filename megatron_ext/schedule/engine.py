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
    at, clock = [0] * len(rows), [0] * len(rows)
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        row, time = rows[rank], clock[rank]
        for position in range(at[rank], len(row)):
            task = row[position]
            if missing[task]:
                break
            ends[task] = time = max(time, ready[task]) + tasks.duration[task]
            at[rank] = position + 1
            for other, lag in tasks.feeds[task]:
                missing[other] -= 1
                ready[other] = max(ready[other], time + lag)
                if not missing[other] and tasks.rank[other] != rank:
                    awake.append(tasks.rank[other])
        clock[rank] = time
    return ends if all(at[rank] == len(row) for rank, row in enumerate(rows)) else None


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
        tasks, ranks = self.tasks, self.ranks
        todo, now = len(tasks.rank), 0
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
            if task is None:
                continue
            patient, todo = True, todo - 1
            rank.start(task)
            self.ends[task] = rank.clock = end = now + tasks.duration[task]
            for other, lag in tasks.feeds[task]:
                self.missing[other] -= 1
                self.ready[other] = max(self.ready[other], end + lag)
                if tasks.rank[other] != number or lag:
                    heappush(wakes, (end + lag, tasks.rank[other]))
            heappush(wakes, (end, number))
        return [rank.row for rank in ranks]


class _Memory:
    """What one rank holds, and what it has still to hold in the order of its base."""

    def __init__(self, tasks: Tasks, base: list[int], cap: int) -> None:
        self._tasks, self._base, self._cap = tasks, base, cap
        self._place = {task: k for k, task in enumerate(base)}
        self._left, self._first = [True] * len(base), 0  # of the base: what has not started
        self._held = 0  # once what runs has ended
        self._growing = sum(tasks.take[task] > tasks.give[task] for task in base)

    @property
    def grows(self) -> bool:
        """True while there is a task that takes more than it gives back."""
        return self._growing > 0

    def has_room(self, task: int) -> bool:
        """True if it fits, and what stands before it in the base fits behind it."""
        take, give, cap = self._tasks.take, self._tasks.give, self._cap
        if self._held + take[task] > cap:
            return False
        held = self._held + take[task] - give[task]
        if held <= self._held:
            return True
        for k in range(self._first, self._place[task]):
            if self._left[k]:
                other = self._base[k]
                held += take[other]
                if held > cap:
                    return False
                held -= give[other]
        return True

    def start(self, task: int) -> None:
        """Take it from the base."""
        self._left[self._place[task]] = False
        while self._first < len(self._left) and not self._left[self._first]:
            self._first += 1
        net = self._tasks.take[task] - self._tasks.give[task]
        self._growing -= net > 0
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
        tasks = run.tasks
        self._run, self._memory = run, _Memory(tasks, base, cap)
        self._gap = gap.as_integer_ratio()
        self._prefer = {task: k for k, task in enumerate(order)}
        self._lanes: dict[int, list[int]] = {}
        for task in reversed(base):
            self._lanes.setdefault(tasks.lane[task], []).append(task)
        # The next task of every lane, those that are preferred first.
        self._heads = sorted((self._prefer[lane[-1]], lane[-1]) for lane in self._lanes.values())
        self.clock, self.row = 0, list[int]()

    def choose(self, now: int, patient: bool) -> int | None:
        """What it starts now, if anything."""
        run, memory = self._run, self._memory
        soonest: int | None = None  # when one that is preferred may be ready
        spare: int | None = None
        for _, task in self._heads:
            if run.missing[task] or run.ready[task] > now:
                if patient and self._gap[0]:
                    expected = self._expected(task, now)
                    if (soonest is None or expected < soonest) and memory.has_room(task):
                        soonest = expected
                continue
            if soonest is not None and self._waits(soonest - now, task):
                continue
            if not memory.has_room(task):
                continue
            if memory.grows or run.tasks.feeds[task]:
                return task
            if spare is None:  # nobody waits for it, and its memory is of no use any more
                spare = task
        if spare is not None and soonest is not None and self._waits(soonest - now, spare):
            return None
        return spare

    def _waits(self, time: int, task: int) -> bool:
        share, whole = self._gap
        return time * whole < share * self._run.tasks.duration[task]

    def _expected(self, task: int, now: int) -> int:
        """The earliest time at which it may be ready, as far as its own inputs say."""
        run, tasks = self._run, self._run.tasks
        missing = [now + tasks.duration[x] + lag for x, lag in tasks.needs[task] if run.ends[x] < 0]
        return max(run.ready[task], *missing) if missing else run.ready[task]

    def start(self, task: int) -> None:
        """Take it from its lane and from the base."""
        self.row.append(task)
        self._memory.start(task)
        self._heads.remove((self._prefer[task], task))
        lane = self._lanes[self._run.tasks.lane[task]]
        lane.pop()
        if lane:
            insort(self._heads, (self._prefer[lane[-1]], lane[-1]))
