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
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from .tasks import Tasks

Rows = list[list[int]]  # tasks of every rank, in order


def one_by_one(tasks: Tasks) -> Rows:
    """One microbatch after the other, forward and back: a base for every cap that holds one."""
    lanes = range(tasks.lane[-1] + 1)
    place = {task: k for lane in lanes for k, task in enumerate(tasks.lane_order(lane))}
    missing = list(map(len, tasks.needs))
    rows: Rows = [[] for _ in range(tasks.placement.pp)]

    def item(task: int) -> tuple[int, int, int]:
        return tasks.microbatch[task % tasks.units], place[task], task

    ready = [item(task) for task, count in enumerate(missing) if not count]
    heapify(ready)
    while ready:
        task = heappop(ready)[-1]
        rows[tasks.rank[task]].append(task)
        for step, _ in tasks.feeds[task]:
            other = task + step
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, item(other))
    return rows


_WAITED_FOR = -2  # in the place of an end: a rank stands before this task


def replay(tasks: Tasks, rows: Sequence[Sequence[int]]) -> list[int] | None:
    """When every task ends if each rank runs its row in order, as early as it can; None if ranks
    wait for each other in a circle."""
    ends, ready = [-1] * len(tasks.rank), [0] * len(tasks.rank)
    missing = list(map(len, tasks.needs))
    rank_of, duration, feeds = tasks.rank, tasks.duration, tasks.feeds
    at, clock = [0] * len(rows), [0] * len(rows)
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        row, time = rows[rank], clock[rank]
        for position in range(at[rank], len(row)):
            task = row[position]
            if missing[task]:
                ends[task], at[rank] = _WAITED_FOR, position
                break
            if time < ready[task]:
                time = ready[task]
            ends[task] = time = time + duration[task]
            for step, lag in feeds[task]:
                other = task + step
                missing[other] = left = missing[other] - 1
                if time + lag > ready[other]:
                    ready[other] = time + lag
                if not left and ends[other] == _WAITED_FOR:
                    awake.append(rank_of[other])
        else:
            at[rank] = len(row)
        clock[rank] = time
    return ends if all(at[rank] == len(row) for rank, row in enumerate(rows)) else None


def time_of(tasks: Tasks, rows: Sequence[Sequence[int]]) -> int | None:
    """Makespan of an order; None if it cannot run."""
    ends = replay(tasks, rows)
    return max(ends) if ends else None


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
    """One list schedule: what all ranks share.

    Attributes:
        missing: by task, how many inputs have not come yet.
        ready: by task, when the last of those that have come was there.
        ends: by task; less than 0 if it has not started.
        place, prefer: by task, its place in the base and in the order of preference.
    """

    def __init__(
        self,
        tasks: Tasks,
        base: Rows,
        caps: Sequence[int],
        gaps: Sequence[Fraction],
        order: Rows,
    ) -> None:
        self.tasks, self.needs, self.feeds = tasks, tasks.needs, tasks.feeds
        self.missing = list(map(len, tasks.needs))
        self.ready, self.ends = [0] * len(tasks.rank), [-1] * len(tasks.rank)
        self.place = _places(base, len(tasks.rank))
        self.prefer = self.place if order is base else _places(order, len(tasks.rank))
        self.ranks = [_Rank(self, *one) for one in zip(base, caps, gaps, order)]

    def rows(self) -> Rows:
        """Of every rank, as they started."""
        ranks, rank_of, duration = self.ranks, self.tasks.rank, self.tasks.duration
        feeds, missing, ready, ends = self.feeds, self.missing, self.ready, self.ends
        todo, now, count = len(rank_of), 0, len(ranks)
        clock, idle = [0] * count, [True] * count  # when every rank is free; it waits then
        coming: Rows = [[] for _ in ranks]  # when inputs come to a rank that does not wait
        wakes = list(range(count))  # a moment times the number of ranks, and the rank
        patient = True
        while todo:
            if not wakes:  # every rank waits for another one: none waits once
                assert patient, "the base cannot be run task by task"
                patient = False
                wakes = [max(now, free) * count + number for number, free in enumerate(clock)]
                heapify(wakes)
            now, number = divmod(heappop(wakes), count)
            if now < clock[number]:
                continue
            rank = ranks[number]
            chosen = rank.choose(now, patient)
            idle[number] = False
            while chosen >= 0:
                patient, todo = True, todo - 1
                task = rank.start(chosen)
                ends[task] = clock[number] = end = now + duration[task]
                for step, lag in feeds[task]:
                    other = task + step
                    missing[other] -= 1
                    time = end + lag
                    if time > ready[other]:
                        ready[other] = time
                    fed = rank_of[other]
                    if idle[fed]:
                        heappush(wakes, time * count + fed)
                    elif (fed != number or lag) and clock[fed] <= time:
                        coming[fed].append(time)
                if wakes and wakes[0] < (end + 1) * count:
                    heappush(wakes, end * count + number)
                    break
                now = end  # nothing happens until then
                chosen = rank.choose(now, patient)
            else:
                idle[number] = True
                for time in coming[number]:
                    if time > now:
                        heappush(wakes, time * count + number)
                coming[number].clear()
        return [rank.row for rank in ranks]


def _places(rows: Rows, tasks: int) -> list[int]:
    """By task, its place in its row."""
    found = [0] * tasks
    for row in rows:
        for place, task in enumerate(row):
            found[task] = place
    return found


class _Memory:
    """What one rank holds, and what it has still to hold in the order of its base."""

    def __init__(self, run: _Run, base: list[int], cap: int) -> None:
        tasks = run.tasks
        self._take, self._give, self._base, self._cap = tasks.take, tasks.give, base, cap
        self._place = run.place
        self._left, self._first = [True] * len(base), 0  # of the base: what has not started
        self._held = 0  # once what runs has ended
        self.growing = sum(tasks.take[task] > tasks.give[task] for task in base)

    def has_room(self, task: int) -> bool:
        """True if it fits, and what stands before it in the base fits behind it."""
        take, give, cap, held = self._take, self._give, self._cap, self._held
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
        net = self._take[task] - self._give[task]
        self.growing -= net > 0
        self._held += net


class _Rank:
    """One rank of a run.

    Args:
        run: what it shares.
        base, cap, gap, order: its own.

    Attributes:
        row: what it has started.
    """

    def __init__(
        self, run: _Run, base: list[int], cap: int, gap: Fraction, order: list[int]
    ) -> None:
        self._run, self._memory = run, _Memory(run, base, cap)
        self._gap, self._order = gap.as_integer_ratio(), order
        lane, ahead = run.tasks.lane, dict[int, int]()
        self._follower = [-1] * len(order)  # the next of its lane; all by place in the order
        for task in reversed(base):
            place = run.prefer[task]
            self._follower[place] = ahead.get(lane[task], -1)
            ahead[lane[task]] = place
        self._heads = sorted(ahead.values())  # the next task of every lane
        self.row = list[int]()

    def choose(self, now: int, patient: bool) -> int:
        """Which of the next tasks it starts now, by their places; less than 0: none."""
        run, memory, order = self._run, self._memory, self._order
        missing, ready, duration = run.missing, run.ready, run.tasks.duration
        share, whole = self._gap
        soonest = spare = -1  # when one that is preferred may be ready; negative: there is none
        for index, place in enumerate(self._heads):
            task = order[place]
            if missing[task] or ready[task] > now:
                if share and patient:
                    expected = self._expected(task, now)
                    if (soonest < 0 or expected < soonest) and memory.has_room(task):
                        soonest = expected
            elif (
                soonest < 0 or (soonest - now) * whole >= share * duration[task]
            ) and memory.has_room(task):
                if memory.growing or run.feeds[task]:
                    return index
                if spare < 0:  # nobody waits for it, and its memory is of no use any more
                    spare = index
        if spare < 0 or soonest < 0:
            return spare
        took = duration[order[self._heads[spare]]]
        return spare if (soonest - now) * whole >= share * took else -1

    def _expected(self, task: int, now: int) -> int:
        """The earliest time at which it may be ready, as far as its own inputs say."""
        run = self._run
        time, ends, took = run.ready[task], run.ends, run.tasks.duration
        for step, lag in run.needs[task]:
            other = task + step
            if ends[other] < 0 and now + took[other] + lag > time:
                time = now + took[other] + lag
        return time

    def start(self, index: int) -> int:
        """Take the task at a place of the next ones, from there and from the base."""
        place = self._heads.pop(index)
        task, follower = self._order[place], self._follower[place]
        self.row.append(task)
        self._memory.start(task)
        if follower >= 0:
            insort(self._heads, follower)
        return task
