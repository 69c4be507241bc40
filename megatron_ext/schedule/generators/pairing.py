"""The machine that makes orders with joint passes: every rank starts what a rule chooses for it.

Ranks run at the times that their passes take, so a rule sees what has come and what is known to
come. W has no rule: it fills gaps, and makes room for the next F where memory is full.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from ..actions import Action, AnyAction, Joint, Op, Operation
from ..costs import Durations
from ..tasks import Tasks

NEVER = 1 << 200
Choice = tuple[AnyAction | None, int]  # what starts now; else when that may be, as far as is known


class Rule(Protocol):
    """How ranks choose among F and B passes."""

    def choose(self, machine: Machine, rank: int, time: int) -> Choice:
        """Its next pass or pair, of a rank that is free."""

    def is_done(self) -> bool:
        """True if nothing is left to choose."""


class _Times:
    """When inputs are there, as far as passes have been started, and what pairs take.

    Args:
        tasks: of the iteration; a unit is a microbatch.
        durations: of the passes, with their communication.
    """

    def __init__(self, tasks: Tasks, durations: Durations) -> None:
        self.placement, self.microbatches, self.durations = tasks.placement, tasks.units, durations
        self._tasks, self._missing = tasks, list(map(len, tasks.needs))
        self._ready = [0] * len(tasks.rank)
        self._joint: dict[tuple[int, int, Operation], int] = {}

    def ready(self, op: Op, stage: int, microbatch: int) -> int:
        """When an F or a B has its inputs; ``NEVER`` if that is not known yet."""
        task = self._tasks.number(op, stage, microbatch)
        return NEVER if self._missing[task] else self._ready[task]

    def _ended(self, op: Op, stage: int, microbatch: int, time: int) -> Iterator[tuple[int, int]]:
        """A pass ends then: (time, rank) of every pass elsewhere that has all its inputs now."""
        rank, task = self._tasks.rank, self._tasks.number(op, stage, microbatch)
        for step, lag in self._tasks.feeds[task]:
            other = task + step
            self._missing[other] -= 1
            self._ready[other] = max(self._ready[other], time + lag)
            if not self._missing[other] and rank[other] != rank[task]:
                yield self._ready[other], rank[other]

    def pair(self, forward: Action, backward: Action) -> int:
        """Duration of a joint F and backward pass."""
        key = forward.stage, backward.stage, backward.op
        if key not in self._joint:
            parts = [(Op.F, forward.stage), (backward.op, backward.stage)]
            self._joint[key] = self.durations.joint(parts)
        return self._joint[key]

    def saved(self, forward: Action, backward: Action) -> int:
        """What a pair takes less than its passes one by one."""
        d = self.durations
        alone = d.of(Op.F, forward.stage) + d.of(backward.op, backward.stage)
        return alone - self.pair(forward, backward)


class Machine(_Times):
    """One run of all ranks.

    Args:
        tasks, durations: as above.
        cap: most activation sets on a rank, from F's start to W's (or BW's) end.
        fused: backward passes are BW.
        gap: share of a W's duration that a rank must be going to wait for W to run.

    Attributes:
        f, b: per stage, how many passes have started.
        sets: per stage, resident sets.
        ranks: every rank's passes.
    """

    def __init__(
        self, tasks: Tasks, durations: Durations, cap: int, fused: bool, gap: Fraction
    ) -> None:
        super().__init__(tasks, durations)
        self.cap, self.backward, self._gap = cap, Op.BW if fused else Op.B, gap
        n, pp = self.placement.num_stages, self.placement.pp
        self.f, self.b, self.sets = [0] * n, [0] * n, [0] * n
        self._weights: list[deque[Action]] = [deque() for _ in range(pp)]
        self._clock, self._wakes = [0] * pp, list(range(pp))  # a heap of time * pp + rank
        self.ranks: list[list[AnyAction]] = [[] for _ in range(pp)]

    def run(self, rule: Rule) -> bool:
        """Fill ``ranks``; False if the rule's choices cannot all run."""
        pp = self.placement.pp
        while self._wakes:
            time, rank = divmod(heapq.heappop(self._wakes), pp)
            if time < self._clock[rank]:
                continue
            action, soon = rule.choose(self, rank, time)
            if action is None:
                action = self._weight(rank, soon - time, full=self.held(rank) >= self.cap)
            if action is not None:
                self._start(rank, time, action)
            elif time < soon < NEVER:
                heapq.heappush(self._wakes, soon * pp + rank)
        return rule.is_done() and not any(self._weights)

    @property
    def makespan(self) -> int:
        """When the last pass ends."""
        return max(self._clock)

    def held(self, rank: int) -> int:
        """Resident sets of a rank."""
        return sum(self.sets[s] for s in self.placement.stages[rank])

    def owes(self, rank: int, stage: int | None = None) -> bool:
        """True if a rank has a W, of one of its stages or any, that it has not started."""
        waiting = self._weights[rank]
        return bool(waiting) if stage is None else any(w.stage == stage for w in waiting)

    def _weight(self, rank: int, wait: int, full: bool) -> Action | None:
        """The rank's next W, if it fits in what the rank waits, or makes room for an F."""
        waiting = self._weights[rank]
        if not waiting:
            return None
        took = self.durations.backward_weight[waiting[0].stage]
        return waiting.popleft() if full or wait >= self._gap * took else None

    def _start(self, rank: int, time: int, action: AnyAction) -> None:
        parts, pp = action.parts, self.placement.pp
        if len(parts) > 1:
            end = time + self.pair(*parts)
        else:
            end = time + self.durations.of(parts[0].op, parts[0].stage)
        for part in parts:
            op, stage, microbatch = part
            if op is Op.F:
                self.f[stage] += 1
                self.sets[stage] += 1
            elif op is Op.B:
                self._weights[rank].append(Action(Op.W, stage, microbatch))
            else:
                self.sets[stage] -= 1
            if op is Op.W:
                continue
            self.b[stage] += op is not Op.F
            for at, to in self._ended(Op.F if op is Op.F else Op.B, stage, microbatch, end):
                heapq.heappush(self._wakes, at * pp + to)
        self.ranks[rank].append(action)
        self._clock[rank] = end
        heapq.heappush(self._wakes, end * pp + rank)


class Item(NamedTuple):
    """What a list has at one place: an F, a backward pass, or both, which run in one another."""

    forward: Action | None
    backward: Action | None


class Listed(Rule):
    """Every rank follows a list; where memory is full its next backward pass comes first.

    Args:
        items: of every rank.
        patience: how long one pass of a pair waits for the other, in what the pair saves; None:
            always.
    """

    def __init__(self, items: Sequence[Sequence[Item]], patience: Fraction | None) -> None:
        self._todo = [list(reversed(row)) for row in items]
        self._patience = patience

    def is_done(self) -> bool:
        return not any(self._todo)

    def choose(self, machine: Machine, rank: int, time: int) -> Choice:
        row = self._todo[rank]
        if not row:
            return None, NEVER
        forward, backward = row[-1]
        if forward is not None and machine.held(rank) >= machine.cap:
            if machine.owes(rank):
                return None, time  # a W makes room
            at = next((i for i in range(len(row) - 1, -1, -1) if row[i].backward), None)
            return (None, NEVER) if at is None else self._alone(machine, row, at, time)
        f = 0 if forward is None else machine.ready(Op.F, *forward[1:])
        b = 0 if backward is None else machine.ready(Op.B, *backward[1:])
        wait = max(f, b) - time
        if wait <= 0:
            row.pop()
            if forward is not None and backward is not None:
                return Joint(forward, backward), time
            return forward or backward, time
        if forward is None or backward is None or self._patience is None or min(f, b) > time:
            return None, max(f, b)
        if wait <= self._patience * machine.saved(forward, backward):
            return None, max(f, b)
        row[-1] = Item(None, backward) if f <= time else Item(forward, None)
        return (forward if f <= time else backward), time

    def _alone(self, machine: Machine, row: list[Item], at: int, time: int) -> Choice:
        """The backward pass of one place, without the F of a pair."""
        forward, backward = row[at]
        assert backward is not None
        ready = machine.ready(Op.B, *backward[1:])
        if ready > time:
            return None, ready
        if forward is None:
            del row[at]
        else:
            row[at] = Item(forward, None)
        return backward, time


class Policy(NamedTuple):
    """How one rank takes what comes.

    Attributes:
        late_f, late_b: of several chunks' F's, or backward passes, the latest chunk's comes first.
        wait_f, wait_b: how long an F, or a backward pass, waits for a partner that is known to
            come, in what the pair saves.
        spare: activation sets that a chunk leaves to each later one; more than ``reserve``.
        reserve: sets that F's alone leave to those in pairs.
        ahead: most sets of the first chunk for F's of it alone, as a share of twice the stages from
            there to the loss; 0: as many as there is memory for.
        whole: backward passes in pairs are BW.
        room: where memory alone keeps an F from running, a W comes before a backward pass.
    """

    late_f: bool
    late_b: bool
    wait_f: Fraction
    wait_b: Fraction
    spare: int = 1
    reserve: int = 0
    ahead: Fraction = Fraction(0)
    whole: bool = False
    room: bool = False


class Greedy(Rule):
    """Ranks take what has come, an F and a backward pass as a pair.

    Every chunk leaves places in memory to the later ones of its rank, so the oldest microbatch
    always finds room on its way and there is no deadlock.

    Args:
        policies: one a rank.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies
        self._left: int | None = None

    def is_done(self) -> bool:
        return self._left == 0

    def choose(self, machine: Machine, rank: int, time: int) -> Choice:
        if self._left is None:
            self._left = 2 * machine.microbatches * machine.placement.num_stages
        action, soon = self._choice(machine, rank, time)
        self._left -= 0 if action is None else len(action.parts)
        return action, soon

    def _choice(self, machine: Machine, rank: int, time: int) -> Choice:
        policy = self._policies[rank]
        b_at, backward = _first(self._backwards(machine, rank), time, policy.late_b)
        f_at, forward = _first(self._forwards(machine, rank, False), time, policy.late_f)
        if forward is not None and backward is not None:
            if policy.whole and not machine.owes(rank, backward.stage):
                backward = backward._replace(op=Op.BW)
            if max(f_at, b_at) <= time:
                # The backward pass of what this F makes has not come: they are independent.
                return Joint(forward, backward), time
            patience = policy.wait_f if f_at <= time else policy.wait_b
            wait = max(f_at, b_at) - time
            if min(f_at, b_at) <= time and wait <= patience * machine.saved(forward, backward):
                return None, max(f_at, b_at)
            backward = backward._replace(op=machine.backward)
        if backward is not None and b_at <= time:
            if policy.room and machine.owes(rank) and self._is_blocked(machine, rank, time):
                return None, time  # a W makes room
            return backward, time
        f_at, forward = _first(self._forwards(machine, rank, True), time, policy.late_f)
        if forward is not None and f_at <= time:
            return forward, time
        return None, min(f_at, b_at)

    def _is_blocked(self, machine: Machine, rank: int, time: int) -> bool:
        """True if memory alone keeps an F from running."""
        if machine.held(rank) < machine.cap:
            return False
        return any(
            (j := machine.f[s]) < machine.microbatches and machine.ready(Op.F, s, j) <= time
            for s in machine.placement.stages[rank]
        )

    def _forwards(self, machine: Machine, rank: int, alone: bool) -> list[tuple[int, Action]]:
        policy, stages = self._policies[rank], machine.placement.stages[rank]
        reserve = policy.reserve if alone else 0
        found, before = [], 0
        if machine.held(rank) + reserve >= machine.cap:
            return []
        for chunk, stage in enumerate(stages):
            before += machine.sets[stage]
            j = machine.f[stage]
            most = machine.cap - policy.spare * (len(stages) - 1 - chunk)
            if alone and chunk == 0 and policy.ahead:
                way = 2 * (machine.placement.num_stages - stage)
                most = min(most, reserve + max(1, int(way * policy.ahead)))
            if j < machine.microbatches and before + reserve < most:
                at = machine.ready(Op.F, stage, j)
                if at < NEVER:
                    found.append((at, Action(Op.F, stage, j)))
        return found

    def _backwards(self, machine: Machine, rank: int) -> list[tuple[int, Action]]:
        found = []
        for stage in machine.placement.stages[rank]:
            j = machine.b[stage]
            if j < machine.microbatches:
                at = machine.ready(Op.B, stage, j)
                if at < NEVER:
                    found.append((at, Action(machine.backward, stage, j)))
        return found


def _first(found: list[tuple[int, Action]], time: int, late: bool) -> tuple[int, Action | None]:
    """Of those that have come the latest (or first) chunk's, else what comes first."""
    come = [one for one in found if one[0] <= time]
    if come:
        return come[-1 if late else 0]
    return min(found, default=(NEVER, None), key=lambda one: one[0])
