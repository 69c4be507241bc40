"""Orders made for offload: a set between its F and its B, once offloaded, does not count in them.

A set that leaves counts on its device from its F's start to its F's end, and again from its B's
start to its W's end, which a search takes for the whole of its memory. The copies' own time on the
device is left as a margin of a set or two; the offload pass then places them, and judges.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

from ..actions import Op
from ..engine import list_schedule, one_by_one, replay
from ..link import Link
from ..schedule import Schedule
from ..search import FINE, Search
from ..tasks import Tasks
from .request import LONG, THOROUGH

_MARGINS = (1, 2)  # sets; none never holds, and three find no faster order
_KEPT = 2  # orders of each search


def orders_for_offload(base: Schedule, link: Link, cap: int, effort: float) -> Iterator[Schedule]:
    """Orders whose sets can nearly all leave, within ``cap`` sets a rank, the tightest last.

    Args:
        base: F, B and W of a named schedule, in its published order; its costs count.
        link: which sets can leave: those whose gap in ``base`` is longer than both copies.
        cap: on the device, activation sets of every rank.
        effort: as ``generate``; 0 makes none.
    """
    durations = base.costs.durations(base.placement).reduced()
    times = link.times(base.placement, durations)
    fine = times.durations.times(FINE, times.durations.scale)
    tasks = Tasks(base.placement, fine, base.microbatches)
    if not effort or len(tasks.rank) > LONG:
        return
    rows = tasks.rows(base.ranks)  # type: ignore[arg-type]
    copies = [FINE * (a + b) for a, b in zip(times.to_host, times.to_device)]
    tasks = _without(tasks, _leaving(tasks, rows, copies))
    work = int(THOROUGH * min(1, 3 * effort))
    for margin in _MARGINS:
        caps = [cap - margin] * base.pp
        one = one_by_one(tasks)
        if not tasks.fits(one, caps):
            return
        fitting = rows if tasks.fits(rows, caps) else list_schedule(tasks, one, caps, order=rows)
        search = Search(tasks, caps)
        search.run([fitting], work)
        for found in search.pool[:_KEPT]:
            yield base.with_ranks(tasks.actions(found.rows))


def _leaving(tasks: Tasks, rows: list[list[int]], copies: list[int]) -> Collection[tuple[int, int]]:
    """(stage, microbatch) of the sets with time for both copies, by the order's own times."""
    ends = replay(tasks, rows)
    assert ends is not None  # a published order
    found = []
    for stage in range(tasks.placement.num_stages):
        for unit in range(tasks.units):
            forward, backward = (tasks.number(op, stage, unit) for op in (Op.F, Op.B))
            gap = ends[backward] - tasks.duration[backward] - ends[forward]
            if gap >= copies[stage]:
                found.append((stage, unit))
    return found


def _without(tasks: Tasks, leaving: Collection[tuple[int, int]]) -> Tasks:
    """The same table, whose F gives what it takes and B takes it again."""
    other = copy.copy(tasks)
    other.take, other.give = list(tasks.take), list(tasks.give)
    for stage, unit in leaving:
        forward, backward = (tasks.number(op, stage, unit) for op in (Op.F, Op.B))
        other.give[forward] = other.take[backward] = tasks.take[forward]
    return other
