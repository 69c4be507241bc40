"""Orders for more microbatches from orders for fewer: a few microbatches' passes are repeated.

An order is cut at one moment: the passes that start before it stay, and before the others come the
last ``period`` passes of every operation and stage once more, as often as needed. What a pass needs
starts before it, so the longer order can run as the shorter one can.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from ..actions import Action, Op, RankActions
from ..effects import peak_sets
from .request import Request

PERIODS = range(1, 7)  # microbatches
_CUTS = 40  # of one order for one period, at most
_ENOUGH = 2  # cuts of an order for one period, before there are more orders and periods

Cut = tuple[int, ...]  # how many passes of every rank start before a moment


class Longer(NamedTuple):
    """One way to lengthen an order.

    Attributes:
        time: what the longer order takes; an estimate if it has far more than p microbatches more.
        orders: for fewer microbatches.
        cut: behind what is repeated.
        period: of it, in microbatches.
        times: how often it is repeated.
    """

    time: Fraction | int
    orders: RankActions
    cut: Cut
    period: int
    times: int

    def made(self) -> RankActions:
        """The longer order."""
        return lengthened(self.orders, self.cut, self.period, self.times)


def longer(
    short: Request,
    pool: Sequence[RankActions],
    more: int,
    cap: int,
    work: int,
    longest: int = PERIODS[-1],
) -> list[Longer]:
    """Ways to lengthen the orders of ``pool`` by ``more`` microbatches, the likely fastest first.

    Args:
        short: the request that the orders are for.
        pool: orders of F, B and W.
        cap: most activation sets on a rank.
        work: passes placed, about.
        longest: period, in microbatches.
    """
    ways: list[Longer] = []
    periods = [period for period in PERIODS if period <= longest and more % period == 0]
    tries = work // sum(map(len, pool[0])) // 2  # cuts, each timed twice at most
    # A long period repeats shorter ones that divide it.
    periods = periods[-max(2, tries // _ENOUGH) :]
    pool = pool[: max(1, tries // (_ENOUGH * len(periods)))]
    least = 1 if longest == 1 else _ENOUGH
    most = max(least, min(_CUTS, tries // (len(pool) * len(periods))))
    for period in periods:
        times = more // period
        far = min(times, 1 + -(-short.pp // period))  # then the steady state is settled
        counts = [far] if far == times else [1, far]
        requests = [replace(short, microbatches=short.microbatches + n * period) for n in counts]
        for orders in pool:
            for cut in cuts(short, orders, period, most):
                taken = []
                for n, request in zip(counts, requests):
                    tried = lengthened(orders, cut, period, n)
                    if max(peak_sets(tried)) > cap:
                        break
                    time = request.time_of(tried)
                    assert time is not None  # only with a limit
                    taken.append(time)
                else:
                    rate = Fraction(taken[-1] - taken[0], max(1, far - 1))
                    estimate = taken[-1] + rate * (times - far)
                    ways.append(Longer(estimate, orders, cut, period, times))
    return sorted(ways, key=lambda way: way.time)


def lengthened(orders: RankActions, cut: Cut, period: int, times: int) -> RankActions:
    """``orders`` for period * times microbatches more; cut where every operation and stage has run
    ``period`` times or more."""
    made: RankActions = []
    for row, end in zip(orders, cut):
        first, rest = row[:end], row[end:]
        ran = {(op, stage): j + 1 for op, stage, j in first}
        again = [a for a in first if a.microbatch >= ran[a.op, a.stage] - period]
        middle = [
            Action(op, stage, j + n * period) for n in range(1, times + 1) for op, stage, j in again
        ]
        tail = [Action(op, stage, j + times * period) for op, stage, j in rest]
        made.append([*first, *middle, *tail])
    return made


def cuts(request: Request, orders: RankActions, period: int, most: int) -> Iterator[Cut]:
    """Cuts of the steady state, at most so many; if it has none, those of all that follows.

    Args:
        request: that ``orders`` are for.
        orders: of F, B and W.
        period: microbatches that every operation and stage has run before the cut, at least.
        most: how many.
    """
    if request.microbatches < period:
        return
    starts = request.starts(orders)
    timed = [pair for row, times in zip(orders, starts) for pair in zip(row, times)]
    begin = max(start for action, start in timed if action.microbatch == period - 1)
    end = max(start for action, start in timed if action.op is Op.F)
    moments = sorted({start for _, start in timed if start > begin})
    steady = moments[: bisect_left(moments, end)] or moments
    number = min(most, len(steady))
    for place in range(number):
        moment = steady[(2 * place + 1) * len(steady) // (2 * number)]
        yield tuple(bisect_left(times, moment) for times in starts)
