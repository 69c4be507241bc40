"""Copies between device and host in simulated time: the queues of the host links."""

from __future__ import annotations

from typing import NamedTuple

from .actions import Action, Op, Operation
from .event_loop import Program
from .link import LinkTimes


class Copy(NamedTuple):
    """One transfer of one set: OFFLOAD (to the host) or RELOAD (to the device)."""

    action: Action
    start: int
    end: int

    def of(self, unit: int) -> Copy:
        """The same with ``unit`` in the place of its number."""
        return self._replace(action=self.action._replace(microbatch=unit))


class Copies:
    """All host links of a pipeline during one simulated run: a queue a rank and direction.

    Attributes:
        done: per rank, the copies in the order in which they were asked for.
    """

    def __init__(self, times: LinkTimes, program: Program) -> None:
        self.done: list[list[Copy]] = [[] for _ in range(program.placement.pp)]
        self._times, self._program = times, program
        self._free: dict[tuple[int, Operation], int] = {}

    def ask(self, rank: int, slot: int, time: int) -> int:
        """``rank`` asks at ``time`` for the copy whose end is ``slot``: when it has ended."""
        action, times = self._program.copy_of(slot), self._times
        length = (times.to_host if action.op is Op.OFFLOAD else times.to_device)[action.stage]
        if self._program.units is not None:
            length *= self._program.units[action.microbatch].size
        start = max(time, self._free.get((rank, action.op), 0))
        end = self._free[rank, action.op] = start + length
        self.done[rank].append(Copy(action, start, end))
        return end
