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
        short: of the same pipeline, for fewer microbatches, whole ones as in ``tasks``.
        tasks: the table for more.
        work: tasks placed, about.
        longest: period, in microbatches.
    """
    few = short.tasks.units
    later = tasks.units - few
    periods = [period for period in PERIODS if period <= longest and later % period == 0]
    tries = work // len(short.tasks.rank) // 2  # cuts, each timed twice at most
    # A long period repeats shorter ones that divide it.
    periods = periods[-max(2, tries // _ENOUGH) :]
    pool = short.pool[: max(1, tries // (_ENOUGH * len(periods)))]
    most = max(1 if longest == 1 else _ENOUGH, min(_CUTS, tries // (len(pool) * len(periods))))
    ended = [_ends(short.tasks, found.rows) for found in pool]
    ways: list[tuple[Fraction, int, Rows, Cut, int]] = []
    for period in periods:
        times = later // period
        far = min(times, 1 + -(-tasks.placement.pp // period))  # then the steady state is settled
        counts = [n * period for n in sorted({1, far})]
        for found, ends in zip(pool, ended):
            for cut in cuts(short.tasks, found.rows, ends, period, most):
                tried = (lengthened(short.tasks, found.rows, cut, period, tasks, n) for n in counts)
                taken = _taken(tasks, tried, short.caps)
                if taken:
                    rate = Fraction(taken[-1] - taken[0], max(1, far - 1))
                    estimate = taken[-1] + rate * (times - far)
                    ways.append((estimate, len(ways), found.rows, cut, period))
    for _, _, rows, cut, period in sorted(ways):
        yield lengthened(short.tasks, rows, cut, period, tasks, later)


def _taken(tasks: Tasks, tried: Iterator[Rows], caps: Sequence[int]) -> list[int]:
    """Times of one way to lengthen an order, repeated once and more often; empty if it does not
    keep the caps, which repeating it again does not change."""
    first = next(tried)
    if not tasks.fits(first, caps):
        return []
    return [max(replay(tasks, rows) or [0]) for rows in (first, *tried)]


def _ends(tasks: Tasks, rows: Rows) -> list[int]:
    ends = replay(tasks, rows)
    assert ends is not None, "the order cannot run"
    return ends


def lengthened(tasks: Tasks, rows: Rows, cut: Cut, period: int, more: Tasks, later: int) -> Rows:
    """``rows`` with some microbatches more, in the numbers of a larger table.

    Args:
        tasks: the table of ``rows``.
        rows: all of it.
        cut: before which every lane has run ``period`` microbatches.
        period: that are repeated.
        more: the same pipeline's table for as many microbatches or more.
        later: microbatches to add, a multiple of ``period``.
    """
    few, apart = tasks.units, more.units - tasks.units
    made: Rows = []
    for row, end in zip(rows, cut):
        renamed = [task + task // few * apart for task in row]
        last = {task // few: task for task in row[:end]}  # of every lane, before the cut
        again = [new for task, new in zip(row[:end], renamed) if task > last[task // few] - period]
        middle = [new + n for n in range(period, later + 1, period) for new in again]
        made.append([*renamed[:end], *middle, *[new + later for new in renamed[end:]]])
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
