"""What MPipeMoE and MPMoE publish: their formulas, and what their search for n costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_ext.reproduce.moe import (
    IntervalSearch,
    choose_strategy,
    closed_form_ms,
    savings,
    search_regrets,
    strategy_regrets,
    wave_ms,
)

Time = Callable[[int, int], float]  # milliseconds for chunks and rows


@pytest.mark.parametrize(
    ("sizes", "pipelined", "sequential"),
    [
        ((2048, 8192, 64, 8192), (16.6, 33.3, 41.6), (4.8, 23.8, 33.3)),
        ((768, 3072, 64, 32768), (23.9, 47.7, 59.7), None),
    ],
)
def test_the_papers_savings(sizes: tuple[int, ...], pipelined: object, sequential: object) -> None:
    """Two of table III's models, n = 2, 4, 8, against both baselines, in per cent."""
    found = [[round(100 * share, 1) for share in savings(*sizes, n)] for n in (2, 4, 8)]
    phi, other = zip(*found)
    assert phi == pipelined
    assert sequential in (None, other)


def test_a_pipelined_layer_without_reuse_needs_more() -> None:
    """16 B*M where the layer that is not pipelined has 13, for many tokens."""
    assert savings(64, 256, 1, 10**9, 1) == pytest.approx((0, -3 / 13), abs=1e-6)


def test_the_closed_form() -> None:
    """Paradigm 1 in the paper's order; by hand for three chunks, and spec 5.3's n = 8."""
    assert closed_form_ms(1, 1, 2, 3) == 6
    assert closed_form_ms(3, 1, 2, 1) == 1 + 2 + 2 + 2 + 1
    assert closed_form_ms(8, 1.0, 1.75, 1.0) == 17.5


def test_equation_10() -> None:
    """Fast links copy, slow ones recompute; a slow network does not send again."""
    assert choose_strategy(1, 0.1, 0.05) == "s1"
    assert choose_strategy(1, 0.1, 3) == "s4"
    assert choose_strategy(1, 3, 0.5) == "s1"
    assert choose_strategy(1, 3, 1.5) == "s3"


def alpha_beta(latency: float) -> Time:
    """One latency per operation; each all-to-all carries half of what the computation takes."""
    return lambda n, rows: closed_form_ms(
        n, latency + rows / n / 2, latency / 2 + rows / n, latency + rows / n / 2
    )


def test_the_papers_search_needs_few_trials() -> None:
    """300 random numbers of rows, n from 2 to 8: exhaustive trials would be over a thousand."""
    for seed, latency in enumerate([2.0, 3.0, 4.0, 5.0, 6.0]):
        rng, time = random.Random(seed), alpha_beta(latency)
        search, seen, wrong = IntervalSearch(range(2, 9), time), set(), 0
        for _ in range(300):
            rows = rng.randint(1, 200)
            seen.add(rows)
            best = min(time(n, rows) for n in range(2, 9))
            wrong += time(search.choose(rows), rows) > best * (1 + 1e-4)
        print(f"latency {latency}: {search.trials} trials, {wrong} of 300 wrong")
        assert wrong <= 2
        assert search.trials <= 100
        assert 7 * len(seen) > 1000


def test_the_papers_search_is_wrong_where_n_falls_as_rows_rise() -> None:
    """It stops at a hill; with steps in the GEMM's time there are some. Why ours tries all."""
    candidates, wrong, worst = range(1, 13), 0, 0.0
    search, best = IntervalSearch(candidates, wave_ms), []
    for rows in range(100, 1300, 25):
        chosen = search.choose(rows)
        best.append(min(candidates, key=lambda n, r=rows: wave_ms(n, r)))
        slower = wave_ms(chosen, rows) / wave_ms(best[-1], rows) - 1
        wrong += slower > 1e-5
        worst = max(worst, slower)
    assert best != sorted(best)
    print(f"{wrong} of {len(best)} wrong, the worst {worst:.1%} slower")
    assert wrong > 20


def test_trials_choose_better_than_the_papers_methods() -> None:
    """On the same times: the tuner loses its margin at most."""
    for regrets, lost in ((search_regrets(wave_ms), 0.1), (strategy_regrets(), 0.05)):
        papers, ours = zip(*regrets)
        assert max(ours) <= 1.02 < 1 + lost < max(papers)
        assert sum(ours) < sum(papers)
