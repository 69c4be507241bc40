"""Checks of vocabulary passes and of the collectives between them."""

from __future__ import annotations

from ..actions import Action
from ..schedule import Schedule
from ..vocabulary import VocabularyOp

_Where = dict[Action, tuple[int, int]]  # action -> (rank, position)


def check_passes(schedule: Schedule, where: _Where) -> None:
    """Every rank has every vocabulary pass of every microbatch once, by its first stage.

    Raises:
        ScheduleError: the first fault found; also vocabulary passes without ``barriers``.
    """
    vocabulary = schedule.vocabulary
    for action, (rank, position) in where.items():
        if not isinstance(action.op, VocabularyOp):
            continue
        if vocabulary is None:
            text = f'{action} needs "vocabulary_barriers": 1 in the file'
            raise schedule.fault(rank, position, text)
        if action.stage != vocabulary.stages[rank]:
            text = f"{action} must name its rank's first stage, {vocabulary.stages[rank]}"
            raise schedule.fault(rank, position, text)
        if action.is_compute and action.op not in vocabulary.passes:
            kind = "training" if vocabulary.training else "forward-only"
            needed = " ".join(op.value for op in vocabulary.passes)
            text = f"{action} is not needed: the vocabulary passes of this {kind} schedule are"
            raise schedule.fault(rank, position, f"{text} {needed}")
    if vocabulary is None:
        return
    for op in vocabulary.passes:
        for microbatch in schedule.units:
            for rank, action in enumerate(vocabulary.actions(op, microbatch)):
                if action not in where:
                    text = f"{action} is missing; every rank needs {op.value} of every microbatch"
                    raise schedule.fault(rank, len(schedule.ranks[rank]), text)


def check_collectives(schedule: Schedule, where: _Where) -> None:
    """Of a lowered schedule: every rank has every collective once, behind the rank's passes whose
    results it carries and before those that wait for it, in one order on all ranks.

    Raises:
        ScheduleError: the first fault found.
    """
    vocabulary = schedule.vocabulary
    if vocabulary is None:
        return
    needed = {
        action
        for op in vocabulary.sources
        for microbatch in schedule.units
        for action in vocabulary.actions(op, microbatch)
    }
    for action, (rank, position) in where.items():
        if action.op.is_collective and action not in needed:
            kind = "" if vocabulary.training else " in a forward-only schedule"
            text = f"{action} is not needed{kind}"
            raise schedule.fault(rank, position, text)
    for action in needed:
        if action not in where:
            rank = schedule.placement.rank_of(action.stage)
            text = f"{action} is missing; all ranks take part in a collective"
            raise schedule.fault(rank, len(schedule.ranks[rank]), text)
    for action, (rank, _) in where.items():
        op, stage, microbatch = action
        if action.is_compute:
            for one in vocabulary.behind(op, stage):
                _in_order(schedule, where, action, vocabulary.actions(one, microbatch)[rank])
            before = vocabulary.before(op, stage)
            if before is not None:
                _in_order(schedule, where, vocabulary.actions(before, microbatch)[rank], action)
    _check_one_order(schedule)


def _in_order(schedule: Schedule, where: _Where, first: Action, then: Action) -> None:
    rank, position = where[then]
    if where[first][1] > position:
        text = f"{then} stands before {first}, whose result it needs"
        raise schedule.fault(rank, position, text)


def _check_one_order(schedule: Schedule) -> None:
    """A communicator matches collectives by order, not by content."""
    orders = [
        [(i, a) for i, a in enumerate(row) if isinstance(a, Action) and a.op.is_collective]
        for row in schedule.ranks
    ]
    for rank, order in enumerate(orders):
        for (position, action), (_, other) in zip(order, orders[0]):
            if (action.op, action.microbatch) != (other.op, other.microbatch):
                text = f"{action} stands where rank 0 has {other}; collectives match in the order"
                raise schedule.fault(rank, position, f"{text} in which all ranks come to them")
