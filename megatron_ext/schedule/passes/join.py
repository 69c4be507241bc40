"""Joint passes: an F and the backward pass next to it on its rank run as one, so that the
communication between experts in each hides behind the computation of the other.

Megatron's combined 1F1B is this rule on the order of ``interleaved``. The ranks of an order are
replayed in time. Where a rank comes to an F and a backward pass, one after the other, it runs them
as one if the inputs of both are there, or come within what that saves. A joint pass begins when all
its inputs are known to come, so the order that results can run. W passes have no place of their
own: they fill waits, and make room where memory is full.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ..actions import Action, AnyAction, Joint, Op
from ..effects import passes, peak_sets
from ..schedule import Schedule
from ..simulate import simulate
from ..tasks import Tasks

_NEVER = 1 << 200


def join(schedule: Schedule, most_sets: int | None = None) -> Schedule:
    """``schedule`` with joint passes, if that is faster under its costs; never slower.

    Args:
        schedule: compute actions of whole microbatches. Its costs have the communication
            (``Costs.exchange``), without which joint passes gain nothing.
        most_sets: on any rank; default one more than ``schedule`` itself holds, because the F of a
            joint pass takes memory before its B frees any.
    """
    if schedule.has_pairs or not any(map(sum, schedule.costs.exchange or ())):
        return schedule
    cap = max(peak_sets(schedule.ranks)) + 1 if most_sets is None else most_sets
    found, time = schedule, simulate(schedule).makespan
    for more in (0, 1):
        for waits in (False, True):
            ranks = _Replay(schedule, cap, more, waits).run()
            made = None if ranks is None else schedule.with_ranks(ranks)
            if made is not None and (other := simulate(made).makespan) < time:
                found, time = made, other
    pairs = sum(len(action.parts) > 1 for row in found.ranks for action in row)
    share = pairs / (schedule.microbatches * schedule.placement.num_stages)
    said = f"{share:.0%} of passes in pairs" if pairs else "passes in pairs would not be faster"
    return replace(found, note="; ".join(filter(None, (schedule.note, said))))


def _earlier(row: Sequence[Action], more: int, op: Op) -> list[Action]:
    """A rank's F's and backward passes, B or BW as ``op`` says; each of these stands behind
    ``more`` more F's than before."""
    forward = [action for action in row if action.op is Op.F]
    found: list[Action] = []
    placed = before = 0
    for action in row:
        if action.op is Op.F:
            before += 1
        elif action.op is not Op.W:
            found += [*forward[placed : before + more], action._replace(op=op)]
            placed = max(placed, before + more)
    return found


class _Replay:
    """One run of all ranks, by the passes that each still has to start.

    Args:
        cap: most activation sets on a rank.
        more: F's that every backward pass stands behind, more than in the schedule.
        waits: the first pass of two waits for the other, as long as joining them saves time.
    """

    def __init__(self, schedule: Schedule, cap: int, more: int, waits: bool) -> None:
        placement = schedule.placement
        self._durations = schedule.costs.durations(placement)
        op = Op.B if schedule.splits_backward else Op.BW
        fused = range(placement.num_stages if op is Op.BW else 0)
        self._tasks = Tasks(placement, self._durations, schedule.microbatches, fused=fused)
        self._cap, self._waits = cap, waits
        self._missing = list(map(len, self._tasks.needs))
        self._inputs = [0] * len(self._missing)
        self._todo = [_earlier(list(passes(row)), more, op)[::-1] for row in schedule.ranks]
        self._weights: list[list[Action]] = [[] for _ in schedule.ranks]
        self._held, self._clock = [0] * schedule.pp, [0] * schedule.pp
        self._wakes = [(0, rank) for rank in range(schedule.pp)]
        self._ranks: list[list[AnyAction]] = [[] for _ in schedule.ranks]

    def run(self) -> list[list[AnyAction]] | None:
        """Every rank's passes; None if they cannot all run."""
        while self._wakes:
            time, rank = heapq.heappop(self._wakes)
            if time >= self._clock[rank]:
                self._go_on(rank, time)
        return None if any(self._todo) or any(self._weights) else self._ranks

    def _go_on(self, rank: int, time: int) -> None:
        """Start what the rank does now, or wait for what it does next."""
        todo, weights = self._todo[rank], self._weights[rank]
        full = self._held[rank] >= self._cap
        if weights and (not todo or (full and todo[-1].op is Op.F)):
            return self._start(rank, time, weights.pop(0))
        place = len(todo) - 1
        while full and place >= 0 and todo[place].op is Op.F:
            place -= 1
        if place < 0:
            return None
        action = todo[place]
        ready = self._ready(action)
        if ready > time:
            if weights and ready - time >= self._durations.of(Op.W, weights[0].stage):
                return self._start(rank, time, weights.pop(0))
            return self._wake(rank, ready)
        other = todo[place - 1] if place and not full else action
        if (action.op is Op.F) != (other.op is Op.F):
            both = Joint(action, other) if action.op is Op.F else Joint(other, action)
            saved = self._took(action) + self._took(other) - self._took(both)
            wait = self._ready(other) - time
            if saved > 0 and wait <= (saved if self._waits else 0):
                if wait > 0:
                    return self._wake(rank, time + wait)
                del todo[place - 1 : place + 1]
                return self._start(rank, time, both)
        del todo[place]
        return self._start(rank, time, action)

    def _ready(self, action: Action) -> int:
        """When its inputs are there; ``_NEVER`` if that is not known yet."""
        task = self._tasks.number(*action)
        return _NEVER if self._missing[task] else self._inputs[task]

    def _took(self, action: AnyAction) -> int:
        return self._durations.joint([(part.op, part.stage) for part in action.parts])

    def _wake(self, rank: int, time: int) -> None:
        if time < _NEVER:
            heapq.heappush(self._wakes, (time, rank))

    def _start(self, rank: int, time: int, action: AnyAction) -> None:
        end = self._clock[rank] = time + self._took(action)
        for part in action.parts:
            if part.op is Op.F:
                self._held[rank] += 1
            elif part.op is Op.B:
                self._weights[rank].append(part._replace(op=Op.W))
            else:
                self._held[rank] -= 1
            task = self._tasks.number(*part)
            for step, lag in self._tasks.feeds[task]:
                fed = task + step
                self._missing[fed] -= 1
                self._inputs[fed] = max(self._inputs[fed], end + lag)
                if self._tasks.rank[fed] != rank:
                    self._wake(self._tasks.rank[fed], self._inputs[fed])
        self._ranks[rank].append(action)
        self._wake(rank, end)
