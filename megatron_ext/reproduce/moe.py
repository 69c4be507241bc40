"""MPipeMoE's and MPMoE's formulas, how they choose n and the strategy, and their tables."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ..moe.autotune import SAMPLES, SearchSpace, StepReport, Tuner
from ..moe.cost_file import Costs
from ..moe.plan import LayerPlan, LayerShape, Restore, Strategy, copied_bytes
from ..plan.moe_layer import GivenCosts, run_layer
from .rows import Cell, published

# Work of a strategy, forward and backward: GEMMs in units of b*H*M, all-to-alls and copies in b*M
# (MPipeMoE, table I, for H = 4M).
WORK: dict[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(map(tuple, passes))
    for name, passes in published()["mpipemoe"]["tables"]["table1"]["rows"].items()
}
_TOKENS = (4096, 8192, 16384, 32768)  # on each device


def choose_strategy(gemm: float, exchange: float, copy: float) -> str:
    """The strategy whose slowest streams take least, the first of equals (MPipeMoE, equation 10).

    Args:
        gemm, exchange, copy: one chunk's time for each unit of ``WORK``.
    """
    units = gemm, exchange, copy
    return min(
        ("s1", "s2", "s3", "s4"),
        key=lambda name: sum(
            max(amount * unit for amount, unit in zip(work, units)) for work in WORK[name]
        ),
    )


def savings(hidden: int, ffn: int, experts: int, tokens: int, chunks: int) -> tuple[float, float]:
    """What reuse saves of the pipelined layer (phi), and of the one that is not pipelined.

    Equations 1 to 6 of MPipeMoE: one expert a device, top-1, Adam, ``tokens`` on each device.
    """
    states = 4 * (experts * hidden + 2 * hidden * ffn)
    activations = tokens * (4 * hidden + ffn)
    exchanged, middle = 2 * hidden * (chunks - 2) / chunks, ffn * (chunks - 1) / chunks
    reused = tokens * (exchanged + middle) if chunks > 1 else 0.0
    sequential = states + activations + tokens * (hidden + ffn)
    pipelined = states + 2 * activations
    return 2 * reused / pipelined, 1 - (pipelined - 2 * reused) / sequential


def closed_form_ms(chunks: int, dispatch: float, compute: float, combine: float) -> float:
    """One direction without copies and restores (MPMoE's paradigm 1).

    Args:
        chunks: all equal, at least 1.
        dispatch, compute, combine: milliseconds of one chunk's S, C and R.
    """
    if chunks == 1:
        return dispatch + compute + combine
    steady = (chunks - 2) * max(dispatch + combine, compute)
    return dispatch + max(dispatch, compute) + steady + max(combine, compute) + combine


def _walk(candidates: Sequence[int], time: Callable[[int], float]) -> dict[int, float]:
    """Times of both ends, then inward from the better one until it gets worse (algorithm 1).

    Has the least if the times fall to it and rise again.
    """
    times = {n: time(n) for n in (candidates[0], candidates[-1])}
    inward = list(candidates)
    if times[inward[-1]] < times[inward[0]]:
        inward.reverse()
    for here, there in pairwise(inward):
        if there not in times:
            times[there] = time(there)
        if times[there] > times[here]:
            break
    return times


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
        times = _walk(between, lambda n: self._time(n, rows))
        self.trials += len(times)
        best = min(times, key=lambda n: (times[n], n))
        insort(self._found, (rows, best))
        return best


def trial_choice(space: SearchSpace, time: Callable[[LayerPlan], float]) -> LayerPlan:
    """What training chooses where a call takes ``time`` of its plan."""
    tuner = Tuner(space, None, Costs(), lambda line: None)
    report = StepReport(1)
    while True:
        tuner.begin_step(report)
        if not tuner.on_trial:
            return tuner.plan
        report = StepReport(1, 0, time(tuner.plan), SAMPLES)


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
        times = {n: time(n, rows) for n in numbers}
        space = SearchSpace(numbers, (Strategy.NONE,))
        chosen = trial_choice(space, lambda plan, t=times: t[plan.chunks])  # type: ignore[misc]
        best = min(times.values())
        yield times[search.choose(rows)] / best, times[chosen.chunks] / best


_DEVICES = 150


def strategy_regrets() -> Iterator[tuple[float, float]]:
    """(equation 10, trials): time over the least of the paper's strategies, on random devices.

    Four chunks in the paper's order; the experts' inside is four times their input, as for H = 4M.
    """
    rng, restoring = random.Random(10), tuple(map(Strategy, WORK))[1:]
    space = SearchSpace((4,), tuple(one for one in Strategy if one in restoring))
    for _ in range(_DEVICES):
        exchange, copy = (10 ** rng.uniform(-1, 1) for _ in "ab")
        costs = GivenCosts(exchange, 2.0, copy, 4 * copy, again=1.0)
        times = {one: run_layer(LayerPlan(4, one), costs).time for one in restoring}
        least = min(times.values())
        papers = times[Strategy(choose_strategy(1.0, exchange, copy))]
        chosen = trial_choice(space, lambda plan, t=times: t[plan.strategy])  # type: ignore[misc]
        yield papers / least, times[chosen.strategy] / least


def _work(data: dict[str, Any]) -> Iterator[Cell]:
    """From the layer plans that training runs."""
    hidden = 1024
    shape = LayerShape(hidden, 4 * hidden, gated=False, kept_bytes=2 * 4 * hidden)
    for name, passes in data["rows"].items():
        strategy = Strategy(name)
        copies = copied_bytes(shape, 1, strategy) / (2 * hidden)
        again = strategy.inside is Restore.RECOMPUTE, strategy.input is Restore.RESEND
        found = (2, 2, copies), (4 + again[0], 2 + again[1], copies)
        for which, *values in zip(("forward", "backward"), passes, found):
            value, ours = map(_words, values)
            yield Cell(f"{name}, {which}", value, ours)


def _words(amounts: Sequence[float]) -> str:
    return "{:g} GEMMs, {:g} all-to-alls, {:g} copies".format(*amounts)


def _limits(data: dict[str, Any]) -> Iterator[Cell]:
    for chunks, values in data["limits"].items():
        shares = savings(1024, 4096, 1, 10**9, int(chunks))
        for of, value, ours in zip(("pipelined", "sequential"), values, shares):
            digits = 1 if value != int(value) else 0
            yield Cell(f"n={chunks}, of the {of} layer", value, 100 * ours, digits)


def _saving(data: dict[str, Any]) -> Iterator[Cell]:
    for chunks, value in data["rows"].items():
        shares = [
            savings(hidden, ffn, 64, tokens, int(chunks))[0]
            for hidden, ffn in map(data["models"].get, ("GPT3-S", "BERT-L", "GPT3-XL"))
            for tokens in _TOKENS
        ]
        yield Cell(f"n={chunks}, average", value, 100 * sum(shares) / len(shares))


def _layer_ms(data: dict[str, Any], name: str, tokens: int, chunks: int = 1) -> float:
    """F and B of one layer without reuse, in 32 bits, for ``tokens`` on each device."""
    (hidden, ffn), rates, rows = data["models"][name], data["rates"], tokens / chunks
    exchange = rates["latency_ms"] + 1e3 * rows * hidden * 4 / rates["network_bytes_s"]
    compute = 1e3 * 2 * 2 * rows * hidden * ffn / rates["flops_s"]
    return sum(closed_form_ms(chunks, exchange, times * compute, exchange) for times in (1, 2))


def _chunks(data: dict[str, Any]) -> Iterator[Cell]:
    for tokens, value in data["rows"].items():
        best = min((2, 4, 8), key=lambda n, t=int(tokens): _layer_ms(data, "GPT3-XL", t, n))  # type: ignore[misc]
        yield Cell(f"GPT3-XL, {tokens} tokens", f"n={value}", f"n={best}")


def _overlap(data: dict[str, Any]) -> Iterator[Cell]:
    for name, value in data["rows"].items():
        gains = [
            1
            - min(_layer_ms(data, name, tokens, n) for n in (2, 4, 8))
            / _layer_ms(data, name, tokens)
            for tokens in _TOKENS
        ]
        yield Cell(f"{name}, 4k to 32k tokens", value, 100 * sum(gains) / len(gains))


def _choices(data: dict[str, Any]) -> Iterator[Cell]:
    found = {
        "smooth": search_regrets(smooth_ms),
        "waves": search_regrets(wave_ms),
        "equation 10": strategy_regrets(),
    }
    for key, what in data["rows"].items():
        papers, ours = zip(*found[key])
        yield Cell(f"{what}, average", sum(papers) / len(papers), sum(ours) / len(ours))
        yield Cell(f"{what}, at worst", max(papers), max(ours))


CELLS = (_work, _limits, _saving, _chunks, _overlap, _choices)
