"""Lowering: the transfers between ranks of a schedule of compute and offload actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..actions import Action, AnyAction
from ..costs import Costs
from ..effects import CARRIED, MESSAGES, given, users
from ..schedule import Schedule
from ..simulate import simulate
from ..vocabulary import VocabularyOp


def lower(schedule: Schedule) -> Schedule:
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

    A collective stands behind the last of the passes whose results it carries, on all ranks.

    Offload actions stay behind the pass that they stand behind, after what that pass sends. They
    concern one rank and wait for nothing but its own copies, which end without anybody's help.

    Args:
        schedule: compute and offload actions are kept in their order; everything else is dropped,
            and transfers between ranks made again. Its costs predict which pass is running when
            data arrives.

    Returns:
        The schedule with transfers.

    Raises:
        ScheduleError: the order of the passes cannot progress.
    """
    waiting = _collectives(schedule)
    run = simulate(schedule, _predicted(schedule))
    rank_of = [schedule.placement.rank_of(s) for s in range(schedule.placement.num_stages)]
    start = {
        result: begin
        for row, begins in zip(run.schedule.ranks, run.start)
        for action, begin in zip(row, begins)
        for result in given(action)
    }
    behind, out = _offloads(schedule)
    by_end: dict[int, list[AnyAction]] = {}
    for row, ends in zip(run.schedule.ranks, run.end):
        for action, end in zip(row, ends):
            by_end.setdefault(end, []).append(action)
    for end in sorted(by_end):
        for action in _tie_order(by_end[end], start, rank_of):
            mine = out[rank_of[action.parts[0].stage]]
            mine.append(action)
            for send, receive in _transfers(action, rank_of):
                mine.append(send)
                out[rank_of[receive.stage]].append(receive)
            for collective in _carried(action, waiting):
                for each, own in zip(out, schedule.placement.stages):
                    each.append(collective._replace(stage=own[0]))
            mine += behind.get(action, ())
    return schedule.with_ranks(out)


def _predicted(schedule: Schedule) -> Costs:
    """Costs with which ``schedule`` is lowered; with them every pass takes time."""
    costs = Costs() if schedule.is_forward_only else schedule.costs
    if schedule.barriers and costs.vocabulary is None:
        costs = costs.with_vocabulary([costs.forward / 4] * 4)
    return costs


_Waiting = dict[Action, tuple[list[int], VocabularyOp]]


def _collectives(schedule: Schedule) -> _Waiting:
    """By result: how many of them its collective still waits for, and which collective that is."""
    if schedule.vocabulary is None:
        return {}
    waiting: _Waiting = {}
    for collective, found in schedule.vocabulary.sources.items():
        for microbatch in schedule.units:
            left = [len(found)]
            for kind, stage in found:
                waiting[Action(kind, stage, microbatch)] = left, collective
    return waiting


def _carried(action: AnyAction, waiting: _Waiting) -> Iterator[Action]:
    """Collectives for which ``action`` is the last that they have waited for."""
    for result in given(action):
        found = waiting.get(result)
        if found is not None:
            found[0][0] -= 1
            if not found[0][0]:
                yield result._replace(op=found[1])


def _offloads(
    schedule: Schedule,
) -> tuple[dict[AnyAction, list[AnyAction]], list[list[AnyAction]]]:
    """Offload actions by the pass that they stand behind; those before every pass, rank by rank."""
    behind: dict[AnyAction, list[AnyAction]] = {}
    first: list[list[AnyAction]] = [[] for _ in schedule.ranks]
    for row, last in zip(schedule.ranks, first):
        for action in row:
            if action.is_compute:
                last = behind[action] = []
            elif action.is_copy:
                last.append(action)
    return behind, first


def _transfers(action: AnyAction, rank_of: Sequence[int]) -> Iterator[tuple[Action, Action]]:
    """The SEND and RECV that carry what ``action`` produces, if another rank needs it; of a joint
    action up to two pairs."""
    for kind, stage, j in given(action):
        for _, other in users(kind, stage, len(rank_of)):
            if rank_of[other] != rank_of[stage]:
                send, receive = MESSAGES[kind]
                yield Action(send, stage, j), Action(receive, other, j)


def _tie_order(
    actions: Sequence[AnyAction], start: dict[Action, int], rank_of: Sequence[int]
) -> list[AnyAction]:
    """Order of passes that end at the same time, at most one a rank.

    A pass that feeds rank r goes before the pass ending on r, so that the RECV is posted before
    that pass, not after it. Two ranks that feed each other cannot both have that: the transfer
    that is needed sooner gets it, and a wish that would close a circle is dropped.
    """
    if len(actions) == 1:
        return list(actions)
    here = {rank_of[a.parts[0].stage]: a for a in actions}
    wishes: list[tuple[int, tuple[Action, ...], tuple[Action, ...]]] = []
    by_parts = {a.parts: a for a in actions}
    for action in actions:
        for _, receive in _transfers(action, rank_of):
            other = here.get(rank_of[receive.stage])
            if other is not None:
                wishes.append((_needed_at(receive, start), action.parts, other.parts))
    after: dict[tuple[Action, ...], list[tuple[Action, ...]]] = {}
    for _, first, then in sorted(wishes):
        if not _leads(then, first, after):
            after.setdefault(first, []).append(then)
    order: list[AnyAction] = []
    todo = sorted(by_parts)
    blocked = dict.fromkeys(todo, 0)
    for followers in after.values():
        for then in followers:
            blocked[then] += 1
    ready = [parts for parts in reversed(todo) if not blocked[parts]]
    while ready:
        first = ready.pop()
        order.append(by_parts[first])
        for then in after.get(first, ()):
            blocked[then] -= 1
            if not blocked[then]:
                ready.append(then)
    return order


def _leads(
    begin: tuple[Action, ...],
    end: tuple[Action, ...],
    after: dict[tuple[Action, ...], list[tuple[Action, ...]]],
) -> bool:
    """True if ``end`` is ``begin`` or comes after it."""
    todo = [begin]
    while todo:
        at = todo.pop()
        if at == end:
            return True
        todo += after.get(at, ())
    return False


def _needed_at(receive: Action, start: dict[Action, int]) -> int:
    """Start of the pass that consumes what ``receive`` brings."""
    return start.get(receive._replace(op=CARRIED[receive.op]), 0)
