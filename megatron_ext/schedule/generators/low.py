"""V placement below V-Min's memory, down to one microbatch's on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from ..actions import RankActions
from ..engine import Rows, list_schedule
from ..tasks import Tasks
from .blocks import VEES
from .request import Request

LEAST_CAP = 2  # activation sets: those of one microbatch, of both chunks of a rank
_GAPS = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(0))
_WALK = 4  # list schedules of a list schedule, backward and forward in time by turns


def low_order(request: Request, cap: int) -> RankActions:
    """The fastest order found under ``cap`` activation sets, 2 or more.

    V-Min's block, repeated at the shortest interval that fits the cap, is the base of list
    schedules for the costs. No order can be near V-Min's makespan here: by Little's law p ranks
    with k sets have k/2 microbatches a rank on their way, each for the time of all stages.
    """
    tasks = Tasks(request.placement, request.durations, request.microbatches)
    every = (tasks.actions(rows) for rows in _found(request, tasks, cap))
    return request.fastest(every)


def _found(request: Request, tasks: Tasks, cap: int) -> Iterator[Rows]:
    caps = [cap] * request.pp
    base = tasks.rows(_slowed(request, cap))
    quick = request.is_long or not request.effort
    for gap in _GAPS[:1] if quick else _GAPS:
        rows = list_schedule(tasks, base, caps, gap=gap)
        yield rows
        for turn in range(0 if quick else _WALK):
            rows = list_schedule(tasks, rows, caps, gap=_GAPS[1], backward=turn % 2 == 0)
            yield rows


def _slowed(request: Request, cap: int) -> RankActions:
    """V-Min's block, repeated slowly enough for the cap."""
    block = VEES["v-min"].block(request.pp)
    while block.peak() > cap:
        block = replace(block, interval=block.interval + 1)
    return block.stamp(request.microbatches)
