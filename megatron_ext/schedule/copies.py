"""Copies between device and host in simulated time: who has asked, who goes next, who waits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from .actions import Action, Op
from .link import Link, LinkTimes
from .placement import Placement
from .schedule import ScheduleError


class Copy(NamedTuple):
    """One transfer of one set: OFFLOAD (to the host) or RELOAD (to the device)."""

    action: Action
    start: int
    end: int


class Copies:
    """All links of a pipeline during one simulated run.

    Attributes:
        done: per rank, the copies that have a start and an end, by start.
    """

    def __init__(self, times: LinkTimes, link: Link, placement: Placement) -> None:
        self.done: list[list[Copy]] = [[] for _ in range(placement.pp)]
        self._times = times
        self._uses = {
            (rank, op): link.uses(rank, op is Op.OFFLOAD)
            for rank in range(placement.pp)
            for op in (Op.OFFLOAD, Op.RELOAD)
        }
        self._queues: dict[Hashable, deque[tuple[int, int, Action]]] = {}  # (ready, rank, action)
        # Heads of the queues by a lower bound of their start: (start, ready, rank, number, stream).
        self._heads: list[tuple[int, int, int, int, Hashable]] = []
        self._free: dict[Hashable, int] = {}
        self._asked: set[Action] = set()
        self._ends: dict[Action, int] = {}
        self._waiting: dict[Action, int] = {}
        self._number = 0  # streams need not compare

    def reach(self, rank: int, action: Action, time: int) -> int | None:
        """``rank``'s computation comes to ``action``: when it can go on, or None if not yet known.

        Raises:
            ScheduleError: a RELEASE whose OFFLOAD does not stand before it.
        """
        op, stage, microbatch = action
        if op is Op.OFFLOAD or op is Op.RELOAD:
            self._ask(rank, action, time)
            return time
        if op is Op.RELEASE:
            needs = Action(Op.OFFLOAD, stage, microbatch)
            if needs not in self._asked:
                raise ScheduleError(f"rank {rank}: {action} stands before {needs} or without it")
        elif op is Op.B or op is Op.BW:
            needs = Action(Op.RELOAD, stage, microbatch)
            if needs not in self._asked:
                return time
        else:
            return time
        end = self._ends.get(needs)
        if end is None:
            self._waiting[needs] = rank
            return None
        return max(time, end)

    def start_next(self) -> list[int]:
        """Give the copy that can start first its time; the rank that waits for it, if one does.

        To be called when every rank waits: nobody can ask for an earlier start any more.
        """
        while self._heads:
            start, ready, rank, _, stream = heapq.heappop(self._heads)
            queue = self._queues[stream]
            _, _, action = queue[0]
            uses = self._uses[rank, action.op]
            now = max(start, *(self._free.get(key, 0) for key in uses))
            if now > start:
                self._push(now, ready, rank, stream)
                continue
            times = self._times
            length = (times.to_host if action.op is Op.OFFLOAD else times.to_device)[action.stage]
            for key in uses:
                self._free[key] = now + length
            self._ends[action] = now + length
            self.done[rank].append(Copy(action, now, now + length))
            queue.popleft()
            if queue:
                self._push(queue[0][0], queue[0][0], rank, stream)
            waiter = self._waiting.pop(action, None)
            if waiter is not None:
                return [waiter]
        return []

    def _ask(self, rank: int, action: Action, ready: int) -> None:
        self._asked.add(action)
        stream = self._uses[rank, action.op][0]
        queue = self._queues.setdefault(stream, deque())
        queue.append((ready, rank, action))
        if len(queue) == 1:
            self._push(ready, ready, rank, stream)

    def _push(self, start: int, ready: int, rank: int, stream: Hashable) -> None:
        self._number += 1
        heapq.heappush(self._heads, (start, ready, rank, self._number, stream))
