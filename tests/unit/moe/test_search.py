"""Search for the number of chunks: right, bounded, and the same on all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from megatron_ext.moe.search import Agreed, Decision, Search, Settings, Timing, bucket
from tests.unit.moe.papers import IntervalSearch, closed_form_ms

ONCE = Settings(samples=1, warmups=0, margin=0.0, max_trials=10**6)

Time = Callable[[int, int], float]  # milliseconds for chunks and rows


def alpha_beta(latency: float) -> Time:
    """One latency per operation; each all-to-all carries half of what the computation takes."""
    return lambda n, rows: closed_form_ms(
        n, latency + rows / n / 2, latency / 2 + rows / n, latency + rows / n / 2
    )


def run_alone(search: Search, rows: int, time: Time) -> int:
    """One rank calls until nothing is left to try."""
    while True:
        decision = search.decide("layer", rows)
        if not decision.ticket:
            return decision.chunks
        search.feed(Timing(decision.ticket, round(1e6 * time(decision.chunks, rows))))


def test_buckets() -> None:
    values = [bucket(rows) for rows in range(5000)]
    assert values == sorted(values)
    for rows in range(1, 5000):
        if bucket(rows) == bucket(rows + 1):
            first = next(r for r in range(rows, 0, -1) if bucket(r - 1) != bucket(rows) or r == 1)
            assert (rows + 1) / first < 1 + 1 / 8
    assert bucket(0) == bucket(1) == 0
    assert bucket(1 << 40) == 8 * 40


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


def wave_time(n: int, rows: int) -> float:
    """GEMMs in waves of 64 rows: some n waste most of the last one, others nothing."""
    exchange = 1 + 0.05 * rows / n
    return closed_form_ms(n, exchange, 0.5 + 4.0 * math.ceil(rows / n / 64), exchange)


def test_the_search_is_right_whatever_the_times_are() -> None:
    rng = random.Random(3)
    for _ in range(200):
        times = {n: rng.uniform(1, 2) for n in (1, 2, 4, 8)}
        chosen = run_alone(Search(settings=ONCE), 64, lambda n, rows, t=times: t[n])
        assert times[chosen] == min(times.values())


def test_the_papers_search_is_wrong_where_n_falls_as_rows_rise() -> None:
    """It stops at a hill; with steps in the GEMM's time there are some. Why ours tries all."""
    candidates, wrong, worst = range(1, 13), 0, 0.0
    search, best = IntervalSearch(candidates, wave_time), []
    for rows in range(100, 1300, 25):
        chosen = search.choose(rows)
        best.append(min(candidates, key=lambda n, r=rows: wave_time(n, r)))
        slower = wave_time(chosen, rows) / wave_time(best[-1], rows) - 1
        wrong += slower > 1e-5
        worst = max(worst, slower)
    assert best != sorted(best)
    print(f"{wrong} of {len(best)} wrong, the worst {worst:.1%} slower")
    assert wrong > 20


@pytest.mark.parametrize("max_trials", [1, 5, 48])
def test_trials_are_bounded(max_trials: int) -> None:
    settings = Settings(samples=2, warmups=1, max_trials=max_trials, recheck_every=5)
    search, rng = Search(settings=settings), random.Random(4)
    for _ in range(400):
        run_alone(search, 1000, lambda n, rows: rng.uniform(1, 2))
    assert search.trials <= max_trials
    assert search.settled("layer", 1000) in (1, 2, 4, 8)


def test_samples_and_warmups() -> None:
    """The first time of each is slow and does not count; of the others the least does."""
    search = Search((1, 2), settings=Settings(samples=2, warmups=1, margin=0.0))
    times = iter([900, 10, 8, 1, 9, 9])
    tried = []
    while (decision := search.decide("layer", 1)).ticket:
        tried.append(decision.chunks)
        search.feed(Timing(decision.ticket, next(times)))
    assert tried == [1, 1, 1, 2, 2, 2]
    assert decision.chunks == 1


def test_one_trial_at_a_time_until_it_is_given_up() -> None:
    search = Search(settings=Settings(patience=3))
    first = search.decide("layer", 7)
    assert first == Decision(1, 1)
    assert search.decide("layer", 7000) == Decision(1, 0)
    assert search.decide("layer", 7) == Decision(1, 0)
    assert search.decide("layer", 7) == Decision(1, 0)
    assert search.decide("layer", 7) == Decision(1, 2)
    search.feed(Timing(first.ticket, 1))  # too late
    assert search.decide("layer", 7) == Decision(1, 0)


def test_another_n_must_be_faster_by_the_margin() -> None:
    for gain, chosen in ((0.02, 1), (0.04, 4)):
        search = Search(settings=Settings(samples=1, warmups=0, margin=0.03))
        times = {1: 1.0, 2: 1.2, 4: 1.0 - gain, 8: 1.1}
        assert run_alone(search, 64, lambda n, rows, t=times: t[n]) == chosen


def test_a_prior_is_used_until_there_are_times() -> None:
    def prior(signature: object, rows: int) -> int:
        return 4 if rows > 100 else 2

    settings = Settings(samples=1, warmups=0, max_trials=2)
    search = Search(settings=settings, prior=prior)
    assert search.decide("layer", 200, timed=False) == Decision(4, 0)
    assert search.decide("layer", 50, timed=False) == Decision(2, 0)
    # Its turn never comes: 1 and 2 are tried, and then there are no more trials.
    assert run_alone(search, 200, lambda n, rows: 1.0) == 4
    assert run_alone(Search(settings=ONCE, prior=prior), 200, lambda n, rows: 1.0 / n) == 8


def test_rechecks_follow_what_changes() -> None:
    settings = Settings(samples=1, warmups=0, margin=0.1, recheck_every=10)
    search, best = Search(settings=settings), 2

    def time(n: int, rows: int) -> float:
        return 1 + abs(n - best)

    assert run_alone(search, 64, time) == 2
    best = 4
    for _ in range(30):
        chosen = run_alone(search, 64, time)
    assert chosen == 4
    assert search.trials <= settings.max_trials


def test_rows_of_one_bucket_are_compared_fairly() -> None:
    """Times in proportion to the rows, 12 % apart: the fewer rows are not taken for a faster n."""
    search = Search((1, 2), settings=Settings(samples=1, warmups=0, margin=0.0))
    assert bucket(1024) == bucket(1151)
    for rows, per_row in ((1151, 1.0), (1024, 1.05)):
        decision = search.decide("layer", rows)
        search.feed(Timing(decision.ticket, round(1000 * rows * per_row)))
    assert search.decide("layer", 1100) == Decision(1, 0)


def test_agreed_times_are_the_slowest_ranks() -> None:
    ranks = [Agreed() for _ in range(3)]
    for i, rank in enumerate(ranks[:2]):
        rank.measured(7, 100 + i)
    pairs = [rank.outgoing() for rank in ranks]
    assert pairs == [(7, 100), (7, 101), (0, 0)]
    assert [rank.incoming(pairs) for rank in ranks] == [[], [], []]
    ranks[2].measured(7, 50)
    pairs = [rank.outgoing() for rank in ranks]
    assert [rank.incoming(pairs) for rank in ranks] == [[Timing(7, 101)]] * 3
    pairs = [rank.outgoing() for rank in ranks]
    assert pairs == [(0, 0)] * 3
    assert ranks[0].incoming(pairs) == []


def test_a_trial_that_not_all_measured_is_dropped() -> None:
    ranks = [Agreed() for _ in range(2)]
    ranks[0].measured(1, 10)  # the other never does
    ranks[1].measured(2, 20)
    assert ranks[0].incoming([rank.outgoing() for rank in ranks]) == []
    ranks[0].measured(2, 30)
    ranks[0].measured(1, 11)
    assert ranks[0].outgoing() == (2, 30)
    assert ranks[1].incoming([rank.outgoing() for rank in ranks]) == [Timing(2, 30)]


def decisions_of_ranks(agree: bool, seed: int) -> list[list[Decision]]:
    """Four noisy ranks and three layers, as a runtime would drive them."""
    rng, world = random.Random(seed), 4
    settings = Settings(samples=1, warmups=1, recheck_every=50, patience=40)
    searches = [Search(settings=settings) for _ in range(world)]
    agreed = [Agreed() for _ in range(world)]
    noise = [random.Random(100 + rank) for rank in range(world)]
    pending: list[list[tuple[int, Timing]]] = [[] for _ in range(world)]
    log: list[list[Decision]] = [[] for _ in range(world)]
    time, clock = alpha_beta(40.0), 0
    for _ in range(300):
        for layer in ("a", "b", "c"):
            clock += 1
            counts = [[rng.randint(20, 40) for _ in range(8)] for _ in range(world)]
            received = [sum(column) for column in zip(*counts)]
            rows = max(sum(received[i : i + 2]) for i in range(0, 8, 2))
            for rank in range(world):  # clocks are read late, and not at the same time
                for due, timing in [*pending[rank]]:
                    if due <= clock:
                        agreed[rank].measured(*timing)
                        pending[rank].remove((due, timing))
            pairs = [one.outgoing() for one in agreed]
            for rank, search in enumerate(searches):
                for timing in agreed[rank].incoming(pairs):
                    local = Timing(timing.ticket, pairs[rank][1])
                    search.feed(timing if agree else local)
                decision = search.decide(layer, rows)
                log[rank].append(decision)
                if decision.ticket and noise[rank].random() > 0.02:  # now and then one is lost
                    us = round(1000 * time(decision.chunks, rows) * noise[rank].uniform(0.3, 3.0))
                    due = clock + noise[rank].randint(1, 4)
                    pending[rank].append((due, Timing(decision.ticket, us)))
    return log


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_all_ranks_decide_the_same(seed: int) -> None:
    log = decisions_of_ranks(True, seed)
    assert log[0] == log[1] == log[2] == log[3]
    assert len({decision.chunks for decision in log[0]}) > 2
    assert sum(decision.ticket > 0 for decision in log[0]) > 20


def test_with_times_of_their_own_they_do_not() -> None:
    """What the test above is worth."""
    logs = [decisions_of_ranks(False, seed) for seed in (5, 6, 7)]
    assert all(any(other != log[0] for other in log) for log in logs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Search(()), "candidates"),
        (lambda: Search((0, 1)), "candidates"),
        (lambda: Settings(samples=0), "samples"),
        (lambda: Settings(warmups=-1), "warmups"),
        (lambda: Settings(margin=1.0), "margin"),
    ],
)
def test_settings_that_are_none(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
