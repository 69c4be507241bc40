"""Which actions are the two ends of one message."""

from __future__ import annotations

from .actions import Action, Op
from .schedule import Schedule

_OTHER_END = {
    Op.SEND_F: (1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (1, Op.SEND_B),
    # These go between neighbouring ranks, the others between neighbouring stages.
    Op.SEND_PREFIX: (1, Op.RECV_PREFIX),
    Op.RECV_PREFIX: (-1, Op.SEND_PREFIX),
    Op.SEND_STATE: (-1, Op.RECV_STATE),
    Op.RECV_STATE: (1, Op.SEND_STATE),
}
_BETWEEN_STAGES = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})


def peer_of(schedule: Schedule, action: Action) -> tuple[int, Action]:
    """Rank on the other end of a SEND or RECV, and the matching action there."""
    op, stage, j = action
    step, matching = _OTHER_END[op]
    placement = schedule.placement
    if op in _BETWEEN_STAGES:
        return placement.rank_of(stage + step), Action(matching, stage + step, j)
    rank = placement.rank_of(stage) + step
    return rank, Action(matching, placement.stages[rank][0], j)
