"""Copies between device and host in simulated time: the queues of the host links."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from .actions import Action, Op, Operation
from .event_loop import Program
from .link import Link, LinkTimes


class Copy(NamedTuple):
    """One transfer of one set: OFFLOAD (to the host) or RELOAD (to the device)."""

    action: Action
    start: int
    end: int

    def of(self, unit: int) -> Copy:
        """The same with ``unit`` in the place of its number."""
        return self._replace(action=self.action._replace(microbatch=unit))


class _Asked(NamedTuple):
    ready: int
    rank: int
    slot: int
    action: Action


class Copies:
    """All host links of a pipeline during one simulated run.

    Attributes:
        done: per rank, the copies that have a start and an end, by start.
    """

    def __init__(self, times: LinkTimes, link: Link, program: Program) -> None:
        placement = program.placement
        self.done: list[list[Copy]] = [[] for _ in range(placement.pp)]
        self._times, self._program = times, program
        self._uses: dict[tuple[int, Operation], tuple[Hashable, ...]] = {
            (rank, op): link.uses(rank, op is Op.OFFLOAD)
            for rank in range(placement.pp)
            for op in (Op.OFFLOAD, Op.RELOAD)
        }
        self._queues: dict[Hashable, deque[_Asked]] = {}
        # Heads of the queues by a lower bound of their start: (start, ready, rank, number, stream).
        self._heads: list[tuple[int, int, int, int, Hashable]] = []
        self._free: dict[Hashable, int] = {}
        self._number = 0  # streams need not compare

    def ask(self, rank: int, slot: int, time: int) -> None:
        """``rank`` asks at ``time`` for the copy whose end is ``slot``."""
        action = self._program.copy_of(slot)
        stream = self._uses[rank, action.op][0]
        queue = self._queues.setdefault(stream, deque())
        queue.append(_Asked(time, rank, slot, action))
        if len(queue) == 1:
            self._push(time, queue[0], stream)

    def start_next(self) -> tuple[int, int] | None:
        """Give the copy that can start first its time: (its slot, its end), or None.

        To be called when every rank waits: nobody can ask for an earlier start any more.
        """
        while self._heads:
            start, _, rank, _, stream = heapq.heappop(self._heads)
            queue = self._queues[stream]
            action = queue[0].action
            uses = self._uses[rank, action.op]
            now = max(start, *(self._free.get(key, 0) for key in uses))
            if now > start:
                self._push(now, queue[0], stream)
                continue
            times = self._times
            length = (times.to_host if action.op is Op.OFFLOAD else times.to_device)[action.stage]
            if self._program.units is not None:
                length *= self._program.units[action.microbatch].size
            for key in uses:
                self._free[key] = now + length
            self.done[rank].append(Copy(action, now, now + length))
            slot = queue.popleft().slot
            if queue:
                self._push(queue[0].ready, queue[0], stream)
            return slot, now + length
        return None

    def _push(self, start: int, asked: _Asked, stream: Hashable) -> None:
        self._number += 1
        heapq.heappush(self._heads, (start, asked.ready, asked.rank, self._number, stream))
