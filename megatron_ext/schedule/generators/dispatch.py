"""Dispatcher: an order for the V placement made pass by pass, with no order given.

Where memory binds, no single period may suit it: a dispatcher then takes what comes, as long as its
memory rule keeps it from deadlock. How a rank chooses is a policy, which a search can vary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ..actions import Action, Op, RankActions
from .request import Request

# Classes of a rank's passes that other ranks wait for: B of its chunks 1 and 0, F of 1 and 0.
PRECEDENCES: tuple[tuple[int, ...], ...] = (
    *((0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)),
    *((2, 1, 0, 3), (0, 1, 3, 2)),
)


class Policy(NamedTuple):
    """How one rank chooses.

    Attributes:
        first: most activation sets of chunk 0 on it, fewer than its cap.
        precedence: index into ``PRECEDENCES``; W comes last, unless memory is full.
        gap: share of a W's duration that the next pass known to come must be away for W to run.
    """

    first: int
    precedence: int
    gap: Fraction


_NEVER = 1 << 200


def dispatch(request: Request, cap: int, policies: Sequence[Policy]) -> RankActions:
    """Every rank's passes under ``cap`` activation sets, each started when its rank is free.

    Deadlock cannot be: chunk 0 never takes a rank's whole memory, so the oldest microbatch on its
    way back always finds room for its F's, and B's and W's need none.

    Args:
        request: placement (V), microbatches and durations.
        cap: most activation sets on a rank, counted from F's start to W's end; >= 2.
        policies: one a rank.
    """
    pp, m, d = request.pp, request.microbatches, request.durations
    stages = 2 * pp
    f_ends: list[list[int]] = [[] for _ in range(stages)]
    b_ends: list[list[int]] = [[] for _ in range(stages)]
    done_w = [0] * stages
    sets, chunk0, clock = [0] * pp, [0] * pp, [0] * pp
    orders: RankActions = [[] for _ in range(pp)]
    wakes = list(range(pp))  # a heap of time * pp + rank
    while wakes:
        time, rank = divmod(heapq.heappop(wakes), pp)
        if time < clock[rank]:
            continue
        policy = policies[rank]
        low, high = rank, stages - 1 - rank
        ready = [_NEVER] * 4
        for index, stage in ((0, high), (1, low)):
            ready[index] = _input(b_ends, f_ends, stage, m, d.hop, pp)
        if sets[rank] < cap:
            ready[2] = _forward_input(f_ends, high, m, d.hop, pp)
            if chunk0[rank] < policy.first:
                ready[3] = _forward_input(f_ends, low, m, d.hop, pp)
        for index in PRECEDENCES[policy.precedence]:
            if ready[index] <= time:
                op, stage = ((Op.B, high), (Op.B, low), (Op.F, high), (Op.F, low))[index]
                break
        else:
            waiting = [s for s in (high, low) if done_w[s] < len(b_ends[s])]
            if not waiting:
                continue
            op, stage = Op.W, min(waiting, key=done_w.__getitem__)
            soon = min(ready)
            if (
                sets[rank] < cap
                and soon < _NEVER
                and (soon - time < policy.gap * d.backward_weight[stage])
            ):
                heapq.heappush(wakes, soon * pp + rank)
                continue
        if op is Op.W:
            microbatch, end = done_w[stage], time + d.backward_weight[stage]
            done_w[stage] += 1
            sets[rank] -= 1
            chunk0[rank] -= stage == low
        else:
            ends, took, fed = (
                (f_ends[stage], d.forward[stage], stage + 1)
                if op is Op.F
                else (b_ends[stage], d.backward_input[stage], stage - 1)
            )
            microbatch, end = len(ends), time + took
            ends.append(end)
            if op is Op.F:
                sets[rank] += 1
                chunk0[rank] += stage == low
            if 0 <= fed < stages:
                other = min(fed, stages - 1 - fed)
                if other != rank:
                    heapq.heappush(wakes, (end + d.hop) * pp + other)
        orders[rank].append(Action(op, stage, microbatch))
        clock[rank] = end
        heapq.heappush(wakes, end * pp + rank)
    return orders


def _forward_input(f_ends: list[list[int]], stage: int, m: int, hop: int, pp: int) -> int:
    """When the next F of ``stage`` has its input; ``_NEVER`` if that is not known yet."""
    microbatch = len(f_ends[stage])
    if microbatch >= m:
        return _NEVER
    if stage == 0:
        return 0
    before = f_ends[stage - 1]
    if len(before) <= microbatch:
        return _NEVER
    return before[microbatch] + (hop if stage != pp else 0)


def _input(
    b_ends: list[list[int]], f_ends: list[list[int]], stage: int, m: int, hop: int, pp: int
) -> int:
    """The same of its next B."""
    microbatch = len(b_ends[stage])
    last = stage == 2 * pp - 1
    after = f_ends[stage] if last else b_ends[stage + 1]
    if microbatch >= m or len(after) <= microbatch:
        return _NEVER
    return after[microbatch] + (hop if not last and stage != pp - 1 else 0)
