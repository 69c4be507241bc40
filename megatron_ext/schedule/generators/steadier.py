"""Of orders as fast and as small, one that loses less where pass times vary."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from ..actions import Action, Op
from ..effects import peak_sets
from ..jitter import jitter
from ..moves import Order, room_of, states
from ..schedule import Schedule
from ..tasks import Tasks
from .request import default_effort

_RUNS = 16  # that orders are compared by; all have the same pass times
_WORK = 400_000  # passes replayed at effort 1, in one to two seconds
_MOST = 60  # orders compared at effort 1
_SHARE = 20  # of all passes, one moves from order to order


def steadier(schedule: Schedule, spread: Fraction | float, effort: float | None = None) -> Schedule:
    """An order as fast and as small as ``schedule``, with a smaller mean makespan under ``jitter``.

    Single passes move at random, as long as the makespan does not grow; of two orders the one with
    the smaller mean of 16 runs stays. No rank takes more activation sets than the fullest one of
    ``schedule``, nor more bytes where sets grow between B and W.

    Args:
        schedule: its own costs are the means.
        spread: relative standard deviation of a pass time, from 0 to 2.
        effort: seconds that it may take, about; counted in passes, so that every machine finds the
            same. One second is enough for orders of up to 25,000 passes.

    Returns:
        ``schedule`` itself if nothing better is found, or not every backward pass is split into B
        and W, or passes are joint, or the vocabulary is sharded, or sets are offloaded, or
        microbatches are cut or differ in their costs.

    Raises:
        ValueError: ``spread`` is out of range.
        ScheduleError: as ``simulate``.
    """
    orders = [[action for action in row if isinstance(action, Action)] for row in schedule.ranks]
    passes = sum(action.op in (Op.F, Op.B, Op.W) for row in orders for action in row)
    every = 3 * schedule.placement.num_stages * schedule.microbatches
    if schedule.has_units or not passes == every == sum(map(len, schedule.ranks)):
        return schedule
    effort = default_effort() if effort is None else effort
    tries = int(effort * min(_MOST, _WORK / (passes * _RUNS)))
    durations = schedule.costs.durations(schedule.placement).reduced()
    tasks = Tasks(schedule.placement, durations, schedule.microbatches)
    rows = tasks.rows(orders)
    best, least = schedule, jitter(schedule, spread, _RUNS).mean
    cap, random = max(peak_sets(schedule.ranks)), Random(5).random
    room = room_of(states(tasks, rows), cap)
    for _ in range(tries):
        order = Order(tasks, rows, [cap] * schedule.pp, room)
        most, moved = order.time, 0
        while moved < passes // _SHARE + 1 and order.work < 4 * passes:
            moved += order.move(random, most - order.time)
        tried = order.present
        found = schedule.with_ranks(tasks.actions(tried))
        mean = jitter(found, spread, _RUNS).mean
        if mean < least:
            best, least, rows = found, mean, tried
    return best
