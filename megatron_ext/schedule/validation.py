"""Optimizer post-validation in a lowered schedule (ZB, section 4; see ``lower``).

The step of the former iteration stands at the begin of the list. ``PREFIX`` and its messages go
from the first rank to the last, ``VALIDATE`` and its messages back; between them run forward passes
of the ranks' first chunks, the *head* of the iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import ALL_VALIDATION_OPS, COMMUNICATION_OPS, VALIDATION_MESSAGES, Action, Op
from .messages import peer_of
from .placement import Placement
from .schedule import Schedule

_STEP = (Op.RECV_PREFIX, Op.PREFIX, Op.SEND_PREFIX, Op.STEP)
_VALIDATE = (Op.RECV_STATE, Op.VALIDATE, Op.SEND_STATE)


def steps(placement: Placement) -> list[list[Action]]:
    """What every rank does first: its step, as far as it is known."""
    return [_of(_STEP, placement, rank) for rank in range(placement.pp)]


def validations(placement: Placement) -> list[list[Action]]:
    """How every rank learns whether its step was right."""
    return [_of(_VALIDATE, placement, rank) for rank in range(placement.pp)]


def _of(ops: Sequence[Op], placement: Placement, rank: int) -> list[Action]:
    missing = set()
    if rank == 0:
        missing |= {Op.RECV_PREFIX, Op.SEND_STATE}
    if rank == placement.pp - 1:
        missing |= {Op.SEND_PREFIX, Op.RECV_STATE}
    return [Action(op, placement.stages[rank][0], 0) for op in ops if op not in missing]


def head_length(row: Sequence[Action]) -> int:
    """How many actions of a rank's list come before what follows its validation; 0 without one."""
    return max(
        (position + 1 for position, a in enumerate(row) if a.op in ALL_VALIDATION_OPS), default=0
    )


def without_validation(row: Sequence[Action]) -> tuple[Action, ...]:
    """A rank's list for an iteration before which the optimizer has stepped as usual."""
    return tuple(action for action in row if action.op not in ALL_VALIDATION_OPS)


def check_validation(schedule: Schedule) -> None:
    """Verify the order on every rank, and that nothing is under way when the ranks validate.

    Raises:
        ScheduleError: the first fault found.
    """
    placement = schedule.placement
    lengths = [head_length(row) for row in schedule.ranks]
    for rank, row in enumerate(schedule.ranks):
        first = steps(placement)[rank]
        last = validations(placement)[rank]
        found = [action for action in row if action.op in ALL_VALIDATION_OPS]
        if found != first + last or list(row[: len(first)]) != first:
            expected = " ".join(map(str, first + last))
            got = " ".join(map(str, found)) or "none"
            raise schedule.fault(
                rank,
                0,
                f"post-validation is {got}, but a rank's is {expected}, its first "
                f"{len(first)} at the begin of its list",
            )
        if list(row[lengths[rank] - len(last) : lengths[rank]]) != last:
            text = f"{' '.join(map(str, last))} must stand together"
            raise schedule.fault(rank, lengths[rank] - 1, text)
        for position in range(len(first), lengths[rank] - len(last)):
            action = row[position]
            if action.is_compute and action[:2] != (Op.F, placement.stages[rank][0]):
                text = f"{action} stands before {last[0]}; only forward passes of the rank's first"
                raise schedule.fault(rank, position, f"{text} chunk may run on a step in doubt")
    where = {action: position for _, position, action in schedule.actions()}
    for rank, position, action in schedule.actions():
        if action.op in COMMUNICATION_OPS - VALIDATION_MESSAGES:
            peer, matching = peer_of(schedule, action)
            if (position < lengths[rank]) != (where[matching] < lengths[peer]):
                text = f"{action} and {matching} of rank {peer} stand on two sides of VALIDATE; a"
                raise schedule.fault(rank, position, f"{text} message must not be under way there")
