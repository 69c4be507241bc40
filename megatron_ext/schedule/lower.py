"""Lowering: add the transfers between ranks to a schedule of compute and offload actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .actions import OFFLOAD_OPS, Action, Op
from .costs import Costs
from .schedule import Schedule
from .simulate import simulate
from .validation import steps, validations


def lower(schedule: Schedule, costs: Costs | None = None, *, validated: bool = False) -> Schedule:
    """Insert SEND and RECV actions into every rank's list, deadlock-free by construction.

    The passes of all ranks are put in one total order by simulated end, and each transfer stands
    directly behind the pass that produces it; every rank's list is what of that order concerns
    it. Why that cannot deadlock, even if every SEND blocks until its RECV is reached: take the
    first transfer of the total order that is not done; everything before it is, so both of its
    ranks have nothing left to do before it but compute, and reach it.

    A RECV thus stands before any pass that is still running, or not begun, on the receiver when
    the data is sent: it can be posted ahead and hide behind that pass. Where passes end at the
    same time, their order is chosen so that as many receives as possible are (see ``_tie_order``).

    A forward-only schedule is lowered at equal costs: no backward pass holds a fast stage back,
    so unequal ones would post receives ever further ahead.

    Offload actions stay behind the pass that they stand behind, after what that pass sends. They
    concern one rank and wait for nothing but its own copies, which end without anybody's help.

    Optimizer post-validation (ZB, section 4) puts the step of the *former* iteration first: the
    ranks' PREFIX from first to last, each with its STEP behind. The ranks' VALIDATE, from last to
    first, stand in the total order behind all passes that have ended when the first one begins
    that is not an F of a rank's first chunk. At that one point, whatever has been sent has been
    received: an iteration can be begun so far, and then be left for something else, or be dropped
    and begun again.

    Args:
        schedule: compute and offload actions are kept in their order; transfers between ranks are
            dropped and made anew.
        costs: used to predict which pass is running when data arrives; default ``schedule.costs``.
        validated: add optimizer post-validation; not for a forward-only schedule.

    Returns:
        The schedule with transfers; its ``costs`` are the given ones.

    Raises:
        ScheduleError: the order of the passes cannot progress.
    """
    costs = schedule.costs if costs is None else costs
    forward_only = all(a.op is Op.F for row in schedule.ranks for a in row if a.is_compute)
    run = simulate(schedule, Costs() if forward_only else costs)
    rank_of = [schedule.placement.rank_of(s) for s in range(schedule.placement.num_stages)]
    start = {
        action: begin
        for row, begins in zip(run.schedule.ranks, run.start)
        for action, begin in zip(row, begins)
    }
    behind, out = _offloads(schedule)
    cut = _head_ends(start, schedule) if validated else None
    if cut is not None:
        out = [[*own, *before] for own, before in zip(steps(schedule.placement), out)]
    by_end: dict[int, list[Action]] = {}
    for row, ends in zip(run.schedule.ranks, run.end):
        for action, end in zip(row, ends):
            by_end.setdefault(end, []).append(action)
    for end in sorted(by_end):
        if cut is not None and end > cut:
            cut = None
            for rank, more in enumerate(validations(schedule.placement)):
                out[rank] += more
        for action in _tie_order(by_end[end], start, rank_of):
            mine = out[rank_of[action.stage]]
            mine.append(action)
            pair = _transfer(action, rank_of)
            if pair is not None:
                for transfer in pair:
                    out[rank_of[transfer.stage]].append(transfer)
            mine += behind.get(action, ())
    return replace(schedule.with_ranks(out), costs=costs)


def _head_ends(start: dict[Action, int], schedule: Schedule) -> int:
    """When the first pass begins that is not an F of a rank's first chunk."""
    first = {row[0] for row in schedule.placement.stages}
    return min(at for a, at in start.items() if a.op is not Op.F or a.stage not in first)


def _offloads(schedule: Schedule) -> tuple[dict[Action, list[Action]], list[list[Action]]]:
    """Offload actions by the pass that they stand behind; those before every pass, rank by rank."""
    behind: dict[Action, list[Action]] = {}
    first: list[list[Action]] = [[] for _ in schedule.ranks]
    for row, last in zip(schedule.ranks, first):
        for action in row:
            if action.is_compute:
                last = behind[action] = []
            elif action.op in OFFLOAD_OPS:
                last.append(action)
    return behind, first


def _transfer(action: Action, rank_of: Sequence[int]) -> tuple[Action, Action] | None:
    """The SEND and RECV that carry what ``action`` produces, if another rank needs it."""
    op, stage, j = action
    if op is Op.F:
        other, send, receive = stage + 1, Op.SEND_F, Op.RECV_F
    elif op is not Op.W:
        other, send, receive = stage - 1, Op.SEND_B, Op.RECV_B
    else:
        return None
    if not 0 <= other < len(rank_of) or rank_of[other] == rank_of[stage]:
        return None
    return Action(send, stage, j), Action(receive, other, j)


def _tie_order(
    actions: Sequence[Action], start: dict[Action, int], rank_of: Sequence[int]
) -> list[Action]:
    """Order of passes that end at the same time, at most one a rank.

    A pass that feeds rank r goes before the pass ending on r, so that the RECV is posted before
    that pass, not after it. Two ranks that feed each other cannot both have that: the transfer
    that is needed sooner gets it. Every pass feeds at most one rank, so the wishes form chains and
    cycles, and following the chain finds a cycle.
    """
    if len(actions) == 1:
        return list(actions)
    here = {rank_of[a.stage]: a for a in actions}
    wishes = []
    for action in actions:
        pair = _transfer(action, rank_of)
        if pair is not None:
            receive = pair[1]
            other = here.get(rank_of[receive.stage])
            if other is not None:
                wishes.append((_needed_at(receive, start), action, other))
    before: dict[Action, Action] = {}
    for _, action, other in sorted(wishes):
        at: Action | None = other
        while at is not None and at != action:
            at = before.get(at)
        if at is None:
            before[action] = other
    order: list[Action] = []
    todo = sorted(actions)
    blocked = dict.fromkeys(todo, 0)
    for other in before.values():
        blocked[other] += 1
    ready = [a for a in reversed(todo) if not blocked[a]]
    while ready:
        action = ready.pop()
        order.append(action)
        follower = before.get(action)
        if follower is not None:
            blocked[follower] -= 1
            if not blocked[follower]:
                ready.append(follower)
    return order


def _needed_at(receive: Action, start: dict[Action, int]) -> int:
    """Start of the pass that consumes what ``receive`` brings."""
    _, stage, j = receive
    ops = (Op.F,) if receive.op is Op.RECV_F else (Op.B, Op.BW)
    return min((start[a] for op in ops if (a := Action(op, stage, j)) in start), default=0)
