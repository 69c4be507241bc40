"""How long a candidate order takes: the simulator's rule, several times faster than its detail.

Every (op, stage) of these orders runs by microbatch. What waits for it therefore takes the end
times first in, first out, and nobody has to look anything up.
"""

from __future__ import annotations

from collections import deque

from ..actions import Op, Orders
from ..costs import Durations
from ..placement import Placement
from ..schedule import ScheduleError
from ..simulate import inputs

_Box = deque[int]  # when the inputs of one lane's next passes arrive
# Of one lane, i.e. (op, stage): duration, its box, the box it fills elsewhere, the hop there, the
# rank there, and the box of its own W.
_Lane = tuple[int, _Box | None, _Box | None, int, int, _Box | None]


def time_of(
    orders: Orders,
    placement: Placement,
    durations: Durations,
    *,
    span: bool = False,
    limit: int | None = None,
) -> int | None:
    """Makespan of ``orders``, or with ``span`` the longest single rank's own span.

    Args:
        orders: compute actions of every rank, each (op, stage) by microbatch.
        placement: where the stages lie.
        durations: of the passes and hops.
        limit: give up, and return None, once the time is known to exceed this.

    Raises:
        ScheduleError: the order cannot progress.
    """
    lanes = _lanes(orders, placement, durations)
    queues = [[lanes[op, stage] for op, stage, _ in row] for row in orders]
    work = [sum(lane[0] for lane in queue) for queue in queues]
    at, clock, idle = ([0] * placement.pp for _ in range(3))
    asleep: list[_Box | None] = [None] * placement.pp
    awake = list(range(placement.pp - 1, -1, -1))
    while awake:
        rank = awake.pop()
        queue, time = queues[rank], clock[rank]
        for position in range(at[rank], len(queue)):
            took, box, filled, hop, peer, own = queue[position]
            if box is not None:
                if not box:
                    asleep[rank] = box
                    at[rank], clock[rank] = position, time
                    break
                ready = box.popleft()
                if ready > time:
                    if position or not span:
                        idle[rank] += ready - time
                        # A rank is done no sooner than its work and its idle time so far allow.
                        if limit is not None and idle[rank] + work[rank] > limit:
                            return None
                    time = ready
            time += took
            if filled is not None:
                filled.append(time + hop)
                if asleep[peer] is filled:
                    asleep[peer] = None
                    awake.append(peer)
            if own is not None:
                own.append(time)
        else:
            at[rank] = len(queue)
    if any(position < len(queue) for position, queue in zip(at, queues)):
        raise ScheduleError("the order cannot progress")
    taken = max(busy + rest for busy, rest in zip(work, idle))
    return None if limit is not None and taken > limit else taken


def _lanes(
    orders: Orders, placement: Placement, durations: Durations
) -> dict[tuple[Op, int], _Lane]:
    rank_of, n = placement.rank_of, placement.num_stages
    names = {(op, stage) for row in orders for op, stage, _ in row}
    # The input that comes last: a B's own F is long there when the next stage's B is.
    source = {name: inputs(*name, n)[-1] for name in names if inputs(*name, n)}
    boxes: dict[tuple[Op, int], _Box] = {name: deque() for name in source}
    lanes: dict[tuple[Op, int], _Lane] = {}
    for op, stage in names:
        kind = 0 if op is Op.F else 1
        elsewhere = own = None
        hop = peer = 0
        for name, of in source.items() if op is not Op.W else ():
            if of != (kind, stage):
                continue
            if name[0] is Op.W:
                own = boxes[name]
            else:
                elsewhere, peer = boxes[name], rank_of(name[1])
                hop = durations.hop if peer != rank_of(stage) else 0
        box = boxes.get((op, stage))
        lanes[op, stage] = durations.of(op, stage), box, elsewhere, hop, peer, own
    return lanes
