"""An order that changes by one task at a time, each move timed from its place on.

A move costs a few tasks' times, not those of the whole order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import log

from .engine import Rows, replay
from .tasks import Tasks

_FAR = 6  # places that a task moves at most
_CRITICAL = 0.8  # how often a task of a critical path is looked for
_LOOKS = 3  # tasks drawn until one is on a critical path
_TIMES = 4  # work: changed times that cost as much as to place a task, or to try a move

Random = Callable[[], float]  # a number from 0 to 1


def anneal(order: Order, work: int, heat: float, enough: Fraction | int, random: Random) -> Rows:
    """Simulated annealing; the fastest order found.

    Args:
        order: to begin with, and changed.
        work: after about so many tries it ends.
        heat: mean delay that is accepted at first, in mean durations; it falls with the square of
            the work that is left.
        enough: a time that no order beats.
        random: numbers from 0 to 1.
    """
    hot = heat * order.mean
    while order.work < work and order.best_time > enough:
        now = hot * (1 - order.work / work) ** 2
        order.move(random, int(-now * log(1 - random())))
    return order.best


class Order:
    """An order under memory caps that changes by one task at a time.

    Every task has its end, and the longest path from its start to the end of all. Both change from
    a move's place on, in the order that they had before; a move is given up as soon as some task
    lies on too long a path (Balas and Vazacopoulos, Management Science 1998).

    Args:
        tasks: the table.
        rows: to begin with; all tasks.
        caps: of every rank, in the unit of the table's sizes.

    Attributes:
        time: of the present order.
        best_time: of the fastest order so far.
        work: times changed, and moves tried.
    """

    def __init__(self, tasks: Tasks, rows: Rows, caps: Sequence[int]) -> None:
        self._tasks = tasks
        self._fixed = _Fixed(tasks)
        self._memory = _Memory(tasks, caps)
        size = len(tasks.rank)
        # A slot more for each rank stands before its first and after its last task.
        self._previous, self._next = ([0] * (size + len(rows)) for _ in range(2))
        for rank, row in enumerate(rows):
            self._link(size + rank, row, size + rank)
            self._memory.note(size + rank, row)
        ends = replay(tasks, rows)
        assert ends is not None, "the order cannot run"
        self._ends, self._paths = ends + [0] * len(rows), [0] * (size + len(rows))
        for task in sorted(range(size), key=lambda task: -ends[task]):
            self._paths[task] = self._fixed.took[task] + self._behind(task)
        self._spread_back(range(size))  # what takes no time ends with what it needs
        self.time = self._longest()
        self.best_time, self._best = self.time, list(self._next)
        self.work = 0

    @property
    def mean(self) -> float:
        """Duration of a task."""
        return sum(self._tasks.duration) / len(self._tasks.duration)

    @property
    def best(self) -> Rows:
        """The fastest order so far."""
        return self._rows(self._best)

    @property
    def present(self) -> Rows:
        """The present order."""
        return self._rows(self._next)

    def _rows(self, after: list[int]) -> Rows:
        size, rows = len(self._tasks.rank), []
        for rank in range(len(after) - size):
            rows.append(list[int]())
            task = after[size + rank]
            while task < size:
                rows[-1].append(task)
                task = after[task]
        return rows

    def _behind(self, task: int) -> int:
        behind = [self._paths[other] + lag for other, lag in self._fixed.feeds[task]]
        return max([self._paths[self._next[task]], *behind])

    def _longest(self) -> int:
        after, paths = self._next, self._paths
        return max([paths[first] for first in after[len(self._tasks.rank) :]])

    def move(self, random: Random, worse: int) -> bool:
        """Move one task, mostly one of a critical path; undone if that cannot run, or makes the
        order slower by more than ``worse``."""
        self.work += 1
        size, limit = len(self._tasks.rank), self.time + worse
        here = int(random() * size)
        if random() < _CRITICAL:
            ends, paths, took, longest = self._ends, self._paths, self._fixed.took, self.time
            for _ in range(_LOOKS):
                if ends[here] - took[here] + paths[here] == longest:
                    break
                here = int(random() * size)
        far = int(random() * 2 * _FAR) - _FAR
        before, after = self._previous, self._next
        passed = (
            self._passed(here, after, far + 1) if far >= 0 else self._passed(here, before, -far)
        )
        if not passed:
            return False
        if far >= 0:
            around, seq, old = (before[here], after[passed[-1]]), [*passed, here], [here, *passed]
        else:
            around, early = (before[passed[-1]], after[here]), passed[::-1]
            seq, old = [here, *early], [*early, here]
        if not self._accepted(old, seq, around, limit, passed if far >= 0 else [here]):
            return False
        self._memory.note(around[0], seq)
        self.time = self._longest()
        if self.time < self.best_time:
            self.best_time, self._best = self.time, list(after)
        return True

    def _passed(self, task: int, then: list[int], most: int) -> list[int]:
        """What ``task`` may pass, at most so many, the nearest first: nothing of its lane, nothing
        that needs it or that it needs, and nothing that would keep the rank beyond its cap."""
        size, lane, own = len(self._tasks.rank), self._fixed.lane, self._fixed.own[task]
        mine, later = lane[task], then is self._next
        passed: list[int] = []
        other = then[task]
        while len(passed) < most and other < size and lane[other] != mine and other not in own:
            if not self._memory.may_pass(task, other, self._previous[other], later):
                break
            passed.append(other)
            other = then[other]
        return passed

    def _accepted(
        self,
        old: list[int],
        seq: list[int],
        around: tuple[int, int],
        limit: int,
        earlier: list[int],
    ) -> bool:
        """Put ``seq`` in the place of ``old``, the same tasks between two others; False, and
        nothing has changed, if no order within ``limit`` comes of it. ``earlier``: the tasks that
        now stand before one that stood before them."""
        ends, paths, size = self._ends, self._paths, len(self._tasks.rank)
        fixed = self._fixed
        took, needs, feeds = fixed.took, fixed.needs, fixed.feeds
        first, last = around
        time, path = ends[first], paths[last]
        times, ways = [], []
        for task in seq:
            for other, lag in needs[task]:
                if ends[other] + lag > time:
                    time = ends[other] + lag
            time += took[task]
            times.append(time)
        for task, end in zip(reversed(seq), reversed(times)):
            for other, lag in feeds[task]:
                if paths[other] + lag > path:
                    path = paths[other] + lag
            if end + path > limit:
                return False
            path += took[task]
            ways.append(path)
        undo = [(task, ends[task]) for task in seq]
        old_paths = [paths[task] for task in seq]
        self._link(first, seq, last)
        width = fixed.width
        heap = [ends[last] << width | last] if last < size else []
        for task, end, path in zip(seq, times, reversed(ways)):
            paths[task] = path
            if ends[task] != end:
                ends[task] = end
                for other, _ in feeds[task]:
                    heappush(heap, ends[other] << width | other)
        if self._spread(heap, undo, limit, earlier):
            seeds = [first, *seq] if first < size else list(seq)
            for task in seq:
                seeds += [other for other, _ in needs[task]]
            self._spread_back(seeds)
            return True
        for task, end in reversed(undo):
            ends[task] = end
        for task, path in zip(seq, old_paths):
            paths[task] = path
        self._link(first, old, last)
        return False

    def _link(self, before: int, tasks: Sequence[int], last: int) -> None:
        for task in tasks:
            self._next[before], self._previous[task] = task, before
            before = task
        self._next[before], self._previous[last] = last, before

    def _spread(
        self, heap: list[int], undo: list[tuple[int, int]], limit: int, earlier: list[int]
    ) -> bool:
        """Change the ends of the tasks in ``heap``, and of all after them; False if one of them
        then lies on a path longer than ``limit``, or the order cannot run.

        Nothing delays those of ``earlier`` but a circle of waits. Without this look each round of
        the circle would add its time until the limit is reached: 2^64 rounds if one task takes
        2^64 times as long as the others.
        """
        ends, paths, before, after = self._ends, self._paths, self._previous, self._next
        fixed, size = self._fixed, len(self._tasks.rank)
        took, needs, feeds, width = fixed.took, fixed.needs, fixed.feeds, fixed.width
        mask, known = (1 << width) - 1, len(undo)
        accepted = True
        while heap:
            task = heappop(heap) & mask
            start = ends[before[task]]
            for other, lag in needs[task]:
                if ends[other] + lag > start:
                    start = ends[other] + lag
            if start + paths[task] > limit:
                accepted = False
                break
            end, was = start + took[task], ends[task]
            if end == was:
                continue
            if end > was and task in earlier:
                accepted = False
                break
            undo.append((task, was))
            ends[task] = end
            other = after[task]
            if other < size:
                heappush(heap, ends[other] << width | other)
            for other, _ in feeds[task]:
                heappush(heap, ends[other] << width | other)
        self.work += (len(undo) - known) // _TIMES
        return accepted

    def _spread_back(self, seeds: Iterable[int]) -> None:
        """The same for the paths of ``seeds`` and of all before them."""
        paths, before, after = self._paths, self._previous, self._next
        fixed, size = self._fixed, len(self._tasks.rank)
        took, needs, feeds, width = fixed.took, fixed.needs, fixed.feeds, fixed.width
        mask = (1 << width) - 1
        heap = [paths[task] << width | task for task in seeds]
        heapify(heap)
        while heap:
            task = heappop(heap) & mask
            path = paths[after[task]]
            for other, lag in feeds[task]:
                if paths[other] + lag > path:
                    path = paths[other] + lag
            path += took[task]
            if path == paths[task]:
                continue
            paths[task] = path
            other = before[task]
            if other < size:
                heappush(heap, paths[other] << width | other)
            for other, _ in needs[task]:
                heappush(heap, paths[other] << width | other)


class _Fixed:
    """What moves do not change.

    Attributes:
        took, lane: by task, and 0 and -1 for the slots of ranks.
        needs, feeds: (other task, lag) of those on other ranks; moves keep those within a rank.
        own: of every task, those of its rank that it needs or feeds.
        width: bits of a task's number.
    """

    def __init__(self, tasks: Tasks) -> None:
        ranks, rank = tasks.placement.pp, tasks.rank
        self.took, self.lane = tasks.duration + [0] * ranks, tasks.lane + [-1] * ranks
        self.width = len(self.took).bit_length()
        self.needs, self.feeds = (
            [
                tuple([(at + step, lag) for step, lag in edges if rank[at + step] != rank[at]])
                for at, edges in enumerate(rows)
            ]
            for rows in (tasks.needs, tasks.feeds)
        )
        self.own = [
            {at + step for step, _ in (*needs, *feeds) if rank[at + step] == rank[at]}
            for at, (needs, feeds) in enumerate(zip(tasks.needs, tasks.feeds))
        ]


class _Memory:
    """What every rank of an order holds after every task.

    Args:
        tasks: the table.
        caps: of every rank.
    """

    def __init__(self, tasks: Tasks, caps: Sequence[int]) -> None:
        ranks = [0] * len(caps)
        self._take = tasks.take + ranks
        self._net = [take - give for take, give in zip(tasks.take, tasks.give)] + ranks
        self._caps = [caps[rank] for rank in tasks.rank]
        self._held = [0] * len(self._net)

    def note(self, before: int, seq: Sequence[int]) -> None:
        """``seq`` stands after ``before``."""
        held = self._held[before]
        for task in seq:
            held += self._net[task]
            self._held[task] = held

    def may_pass(self, task: int, other: int, before: int, later: bool) -> bool:
        """True if the rank keeps its cap where ``task`` moves past ``other``, which comes after
        ``before``: one that gives memory back later, or one that takes it earlier."""
        net, held, take = self._net[task], self._held, self._take
        if later:
            return (
                net >= 0 or held[other] - net - self._net[other] + take[other] <= self._caps[task]
            )
        most = max(held[before] + take[task], held[before] + net + take[other])
        return net <= 0 or most <= self._caps[task]
