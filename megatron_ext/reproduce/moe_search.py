"""How the papers choose n and the strategy, beside what the trials of training choose.

Both run on the same random times. MPMoE's algorithm 1 searches n; MPipeMoE's equation 10 takes the
strategy by its slowest streams.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from ..moe.autotune import SAMPLES, SearchSpace, StepReport, Tuner
from ..moe.cost_file import Costs
from ..moe.plan import LayerPlan, Strategy
from ..plan.moe_layer import GivenCosts, run_layer
from .moe_equations import WORK, choose_strategy, closed_form_ms

Time = Callable[[LayerPlan], float]


def next_unimodal(candidates: Sequence[int], times: Mapping[int, float]) -> int | None:
    """Both ends, then inward from the better one until it gets worse (MPMoE, algorithm 1).

    Right if the times fall to their least and rise again. None: nothing left to try.
    """
    for end in (candidates[0], candidates[-1]):
        if end not in times:
            return end
    walk = list(candidates)
    if times[walk[-1]] < times[walk[0]]:
        walk.reverse()
    for here, there in pairwise(walk):
        if there not in times:
            return there
        if times[there] > times[here]:
            return None
    return None


class IntervalSearch:
    """MPMoE's search for n: n rises with the rows, and the times have one least.

    Rows between two of the same n need no trial, others only those between their neighbours' n.

    Args:
        candidates: of n, ascending.
        time: of a call, for n and rows.
    """

    def __init__(self, candidates: Sequence[int], time: Callable[[int, int], float]) -> None:
        self._candidates, self._time = candidates, time
        self._found: list[tuple[int, int]] = []  # rows and n, ascending
        self.trials = 0

    def choose(self, rows: int) -> int:
        """The n for calls of so many rows."""
        place = bisect_left(self._found, (rows, 0))
        if place < len(self._found) and self._found[place][0] == rows:
            return self._found[place][1]
        low = self._found[place - 1][1] if place > 0 else self._candidates[0]
        high = self._found[place][1] if place < len(self._found) else self._candidates[-1]
        low, high = min(low, high), max(low, high)
        between = [n for n in self._candidates if low <= n <= high]
        if len(between) == 1:
            return between[0]
        times: dict[int, float] = {}
        while (n := next_unimodal(between, times)) is not None:
            times[n] = self._time(n, rows)
            self.trials += 1
        best = min(times, key=lambda n: (times[n], n))
        insort(self._found, (rows, best))
        return best


def trial_choice(space: SearchSpace, time: Time) -> tuple[LayerPlan, int]:
    """What training chooses where a call takes ``time`` of its plan, and how many it tried."""
    tuner = Tuner(space, None, Costs(), lambda line: None)
    report, trials = StepReport(1), 0
    while True:
        tuner.begin_step(report)
        if not tuner.on_trial:
            return tuner.plan, trials
        report, trials = StepReport(1, 0, time(tuner.plan), SAMPLES), trials + 1


def smooth_ms(chunks: int, rows: int) -> float:
    """A forward pass with a latency for each operation; messages take half of what experts do."""
    part = rows / chunks
    return closed_form_ms(chunks, 4 + part / 2, 2 + part, 4 + part / 2)


def wave_ms(chunks: int, rows: int) -> float:
    """The same with products in waves of 64 rows: some n waste most of the last one."""
    exchange = 1 + 0.05 * rows / chunks
    return closed_form_ms(chunks, exchange, 0.5 + 4.0 * math.ceil(rows / chunks / 64), exchange)


def search_regrets(time: Callable[[int, int], float]) -> Iterator[tuple[float, float]]:
    """(algorithm 1, trials): time over the least, for many numbers of rows in training's n."""
    numbers = SearchSpace.of().chunks
    search = IntervalSearch(numbers, time)
    for rows in range(100, 1300, 25):
        best = min(time(n, rows) for n in numbers)
        chosen, _ = trial_choice(
            SearchSpace(numbers, (Strategy.NONE,)),
            lambda plan, rows=rows: time(plan.chunks, rows),  # type: ignore[misc]
        )
        yield time(search.choose(rows), rows) / best, time(chosen.chunks, rows) / best


def strategy_regrets(cases: int = 150) -> Iterator[tuple[float, float]]:
    """(equation 10, trials): time over the least of the paper's strategies, on random devices.

    Four chunks in the paper's order; the experts' inside is four times their input, as for H = 4M.
    """
    rng, restoring = random.Random(10), tuple(map(Strategy, WORK))[1:]
    space = SearchSpace((4,), tuple(one for one in Strategy if one in restoring))
    for _ in range(cases):
        exchange, copy = (10 ** rng.uniform(-1, 1) for _ in "ab")
        costs = GivenCosts(exchange, 2.0, copy, 4 * copy, again=1.0)
        times = {one: run_layer(LayerPlan(4, one), costs).time for one in restoring}
        least = min(times.values())
        papers = times[Strategy(choose_strategy(1.0, exchange, copy))]
        chosen, _ = trial_choice(space, lambda plan, t=times: t[plan.strategy])  # type: ignore[misc]
        yield papers / least, times[chosen.strategy] / least
