"""Orders for more microbatches from orders for fewer: a few microbatches' tasks are repeated.

An order is cut at one moment: the tasks that start before it stay, and before the others come the
last ``period`` microbatches of every lane once more, as often as needed. What a task needs starts
before it, so the longer order can run as the shorter one can.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..engine import Rows, replay
from ..search import Search
from ..tasks import Tasks

PERIODS = range(1, 7)  # microbatches
_CUTS = 40  # of one order for one period, at most
_ENOUGH = 2  # cuts of an order for one period, before there are more orders and periods

Cut = tuple[int, ...]  # how many tasks of every rank start before a moment


def longer(short: Search, tasks: Tasks, work: int, longest: int = PERIODS[-1]) -> Iterator[Rows]:
    """Orders of ``tasks`` within the caps, the likely fastest first, from those of ``short``.

    Args:
        short: of the same pipeline, for fewer microbatches with units alike.
        tasks: the table for more.
        work: tasks placed, about.
        longest: period, in microbatches.
    """
    few = short.tasks.units
    more = tasks.units - few
    periods = [period for period in PERIODS if period <= longest and more % period == 0]
    tries = work // len(short.tasks.rank) // 2  # cuts, each timed twice at most
    # A long period repeats shorter ones that divide it.
    periods = periods[-max(2, tries // _ENOUGH) :]
    pool = short.pool[: max(1, tries // (_ENOUGH * len(periods)))]
    most = max(1 if longest == 1 else _ENOUGH, min(_CUTS, tries // (len(pool) * len(periods))))
    ended = [_ends(short.tasks, found.rows) for found in pool]
    ways: list[tuple[Fraction, int, Rows, Cut, int]] = []
    for period in periods:
        times = more // period
        far = min(times, 1 + -(-tasks.placement.pp // period))  # then the steady state is settled
        tables = [tasks.like(few + n * period) for n in sorted({1, far})]
        for found, ends in zip(pool, ended):
            for cut in cuts(short.tasks, found.rows, ends, period, most):
                taken = _taken(short, found.rows, cut, period, tables)
                if taken:
                    rate = Fraction(taken[-1] - taken[0], max(1, far - 1))
                    estimate = taken[-1] + rate * (times - far)
                    ways.append((estimate, len(ways), found.rows, cut, period))
    for _, _, rows, cut, period in sorted(ways):
        yield lengthened(short.tasks, rows, cut, period, tasks)


def _taken(short: Search, rows: Rows, cut: Cut, period: int, tables: Sequence[Tasks]) -> list[int]:
    """Time of one way to lengthen an order, for every table; empty if it does not keep the caps."""
    taken = []
    for table in tables:
        longer_rows = lengthened(short.tasks, rows, cut, period, table)
        if any(peak > cap for peak, cap in zip(table.peaks(longer_rows), short.caps)):
            return []
        taken.append(max(replay(table, longer_rows) or [0]))
    return taken


def _ends(tasks: Tasks, rows: Rows) -> list[int]:
    ends = replay(tasks, rows)
    assert ends is not None, "the order cannot run"
    return ends


def lengthened(tasks: Tasks, rows: Rows, cut: Cut, period: int, more: Tasks) -> Rows:
    """``rows`` for the microbatches of ``more``; every lane has run ``period`` before the cut."""
    few = tasks.units
    lanes = range(tasks.lane[-1] + 1)
    place = [0] * len(tasks.lane)  # of every task in its lane
    for lane in lanes:
        for k, task in enumerate(tasks.lane_order(lane)):
            place[task] = k
    order = [more.lane_order(lane) for lane in lanes]
    later = more.units - few
    made: Rows = []
    for row, end in zip(rows, cut):
        pairs = [(order[task // few], place[task]) for task in row]
        ran = {task // few: place[task] + 1 for task in row[:end]}
        again = [
            pair for task, pair in zip(row[:end], pairs) if pair[1] >= ran[task // few] - period
        ]
        middle = [lane[k + n] for n in range(period, later + 1, period) for lane, k in again]
        tail = [lane[k + later] for lane, k in pairs[end:]]
        made.append([*(lane[k] for lane, k in pairs[:end]), *middle, *tail])
    return made


def cuts(tasks: Tasks, rows: Rows, ends: Sequence[int], period: int, most: int) -> Iterator[Cut]:
    """Cuts of the steady state, at most so many; if it has none, those of all that follows.

    Args:
        tasks: the table.
        rows: all of it.
        ends: of its tasks (``replay``).
        period: microbatches that every lane has run before the cut, at least.
        most: how many.
    """
    if tasks.units < period:
        return
    starts = [[ends[task] - tasks.duration[task] for task in row] for row in rows]
    timed = [pair for row, times in zip(rows, starts) for pair in zip(row, times)]
    begin = max(start for task, start in timed if task % tasks.units == period - 1)
    end = max(start for task, start in timed if tasks.take[task])
    moments = sorted({start for _, start in timed if start > begin})
    steady = moments[: bisect_left(moments, end)] or moments
    number = min(most, len(steady))
    for place in range(number):
        moment = steady[(2 * place + 1) * len(steady) // (2 * number)]
        yield tuple(bisect_left(times, moment) for times in starts)
