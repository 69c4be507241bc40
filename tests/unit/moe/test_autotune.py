"""Trials in training: the same decisions on all ranks, within the budget, and right in the end."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.moe import autotune
from megatron_ext.moe.autotune import (
    SearchSpace,
    StepReport,
    Tuner,
    bucket,
    largest,
)
from megatron_ext.moe.cost_file import Costs, parse
from megatron_ext.moe.plan import STOCK, Budget, LayerPlan, LayerShape, Strategy, footprint
from megatron_ext.plan.moe_layer import ChunkTimes, Local, run_layer

SHAPE = LayerShape(64, 128)
RANKS = 3
TOKENS = 512

Time = Callable[[LayerPlan], float]  # milliseconds a token


def peak(plan: LayerPlan, rows: int, calls: int = 4) -> int:
    return footprint(SHAPE, rows, calls, plan).peak_bytes


class Job:
    """All ranks of a group, each with a tuner; the integration's part is played here."""

    def __init__(
        self,
        space: SearchSpace,
        budget: int | None = None,
        costs: Costs | None = None,
        shape: LayerShape = SHAPE,
        ranks: int = RANKS,
    ) -> None:
        self.log: list[str] = []
        limit = None if budget is None else Budget(budget, shape, lambda: 4)
        self.tuners = [
            Tuner(space, limit, costs or Costs(), log)
            for log in (self.log.append, *[lambda line: None] * (ranks - 1))
        ]
        self.report = StepReport(0)
        self.trials: list[LayerPlan] = []

    def step(
        self,
        time: Time,
        tokens: int = TOKENS,
        rows: int = 1000,
        calls: int = 4,
        noise: Callable[[int, LayerPlan], float] = lambda rank, plan: 1.0,
    ) -> LayerPlan:
        """A step of training; returns what its last call ran by, on all ranks alike."""
        first = not self.report.tokens
        agreed = StepReport(tokens, rows) if first else self.report._replace(tokens=tokens)
        plans = []
        for tuner in self.tuners:
            tuner.begin_step(agreed)
            for _ in range(calls):
                tuner.count_call()
                plans.append(STOCK if tuner.plan.stock else tuner.plan_for(rows))
        assert len(set(plans)) == 1 and len({tuner.on_trial for tuner in self.tuners}) == 1
        samples = calls if self.tuners[0].on_trial else 0
        took = time(plans[0]) if samples else 0
        reports = [
            StepReport(tokens, rows - rank, took * noise(rank, plans[0]), samples * bool(took))
            for rank in range(len(self.tuners))
        ]
        self.report = StepReport(*map(max, zip(*reports)))
        self.trials += [plans[0]] * bool(samples)
        return plans[0]

    def run(self, time: Time, steps: int = 60, **options: Any) -> LayerPlan:
        for _ in range(steps):
            plan = self.step(time, **options)
        assert not self.tuners[0].on_trial
        return plan


def by_chunks(*times: float) -> Time:
    return lambda plan: dict(zip((1, 2, 4, 8), times))[plan.chunks]


def test_buckets() -> None:
    values = [bucket(rows) for rows in range(5000)]
    assert values == sorted(values)
    for rows in range(1, 5000):
        assert bucket(rows) == bucket(largest(bucket(rows))) < bucket(largest(bucket(rows)) + 1)
        if bucket(rows) == bucket(rows + 1):
            first = next(r for r in range(rows, 0, -1) if bucket(r - 1) != bucket(rows) or r == 1)
            assert (rows + 1) / first < 1 + 1 / 8
    assert bucket(0) == bucket(1) == 0
    assert bucket(1 << 40) == 8 * 40


def test_spaces() -> None:
    assert SearchSpace.of().plans()[0] == STOCK and len(SearchSpace.of().plans()) == 24
    assert SearchSpace.of("4", "s2").plans() == [LayerPlan.of(4, "s2")]
    for wrong in (("many", "none"), (0, "none"), ("4", "s7")):
        with pytest.raises(ValueError):
            SearchSpace.of(*wrong)


@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_the_fastest_stays(best: int) -> None:
    """Four plans, and two other orders of the best."""
    job = Job(SearchSpace.of("auto", "none"))
    found = job.run(lambda plan: 5 if plan.chunks == best else 9, 8)
    assert found.chunks == best
    assert job.trials[0] == STOCK and len(job.trials) <= 6


@pytest.mark.parametrize("strategy", ["none", "auto"])
@pytest.mark.parametrize("calls", [4, 1])
def test_it_is_decided_within_the_steps_that_the_log_states(strategy: str, calls: int) -> None:
    """Where all times are about the same, so that everything is tried."""
    rng = random.Random(2)
    budget = None if strategy == "none" else peak(LayerPlan.of(4, "s1"), 1200)
    job = Job(SearchSpace.of("auto", strategy), budget)
    times: dict[LayerPlan, float] = defaultdict(lambda: rng.uniform(1, 1.05))
    job.step(times.__getitem__, calls=calls)
    found = re.search(r"at most (\d+) plans.* within (\d+) steps, or (\d+) where", job.log[0])
    assert found is not None
    plans, steps, most = map(int, found.groups())
    taken = 1
    while job.step(times.__getitem__, calls=calls) and job.tuners[0].on_trial:
        taken += 1
    assert taken <= (steps if calls >= 4 else most)
    assert len(set(job.trials)) == plans  # the statement is not a loose one


def test_tokens_that_alternate_are_decided_too() -> None:
    """With one call a step, so that a plan's trial takes several steps of its bucket."""
    job = Job(SearchSpace.of("auto", "none"))
    for step in range(2 * 8 * autotune.MOST_STEPS + 2):
        job.step(by_chunks(4, 3, 1, 2), tokens=(64, 4096)[step % 2], calls=1)
    assert not job.tuners[0].on_trial
    assert len(job.tuners[0].costs.times) == 2


def test_the_search_is_right_whatever_the_times_are() -> None:
    """Of all plans in the paper's order the fastest, but for the margin; then of its orders."""
    rng = random.Random(3)
    for _ in range(50):
        plans = [LayerPlan(n, lookahead=a) for n in (1, 2, 4, 8) for a in (2, 3, 4, 8)]
        times = {plan: rng.uniform(1, 2) for plan in plans}
        job = Job(SearchSpace.of("auto", "none"))
        found = job.run(times.__getitem__, 10)
        papers = [LayerPlan(n) for n in (1, 2, 4, 8)]
        limit = (1 + autotune.ORDER_GAIN) / (1 + autotune.MARGIN) * times[found]
        near = [plan for plan in papers if times[plan] <= limit]
        others = [p._replace(lookahead=a) for p in near for a in (3, p.chunks) if 2 < a <= p.chunks]
        least = min(times[plan] for plan in (*papers, *others))
        assert times[found] <= (1 + autotune.MARGIN) * least


class Device:
    """A made-up device with everything that the tuner's bound leaves out: latencies, launches,
    products in whole waves, weights read a chunk, messages and copies that slow each other."""

    def __init__(self, rng: random.Random) -> None:
        self.network, self.copy = 10 ** rng.uniform(-1.5, 1), 10 ** rng.uniform(-2, 1)
        self.inside, self.wave = rng.uniform(1, 6), rng.choice((1e-9, 1 / 64, 1 / 11, 1 / 5))
        self.latency, self.launch = 10 ** rng.uniform(-4, -1.5), 10 ** rng.uniform(-4, -1.5)
        self.local, self.weights = rng.uniform(0, 0.1), rng.choice((0, 0.02, 0.2))
        self.beside = rng.choice((1, 1.1, 1.4))

    def products(self, chunks: int) -> float:
        """Milliseconds of a chunk's experts."""
        return self.launch + math.ceil(1 / chunks / self.wave) * self.wave

    def costs(self, plan: LayerPlan) -> ChunkTimes:
        n, products = plan.chunks, self.products(plan.chunks)
        slower = 1 if n == 1 else self.beside
        message = self.latency + slower * self.network / n
        local = Local(0, *[self.launch * (n > 1) + self.local / n] * 4)
        copies = [slower * one * self.copy / n for one in (1, self.inside)]
        return ChunkTimes(
            message, message, products, products, products + self.weights,
            plan.chunks * products + self.weights, 0.6 * products,
            input_copy=copies[0], inside_copy=copies[1], input_load=copies[0],
            inside_load=copies[1], forward=local, backward=local, restore=local,
        )  # fmt: skip

    def time(self, plan: LayerPlan) -> float:
        return run_layer(plan, self.costs).time


@pytest.mark.parametrize(
    "limit", [None, LayerPlan(4), LayerPlan.of(4, "s1"), LayerPlan.of(2, "s4")]
)
def test_the_choice_on_made_up_devices(limit: LayerPlan | None) -> None:
    """Within 3 % of the best of all plans in all orders, and never slower than Megatron's layer."""
    rng, tried, worst = random.Random(11), list[int](), 1.0
    for _ in range(12):
        device = Device(rng)
        budget = None if limit is None else peak(limit, 1200)
        shape = SHAPE._replace(kept_bytes=device.inside * 2 * SHAPE.hidden)
        job = Job(SearchSpace.of(), budget, Costs(), shape, ranks=1)
        found = job.run(device.time, 90)
        tuner = job.tuners[0]
        every = [
            LayerPlan(n, s, a) for n in (1, 2, 4, 8) for s in Strategy for a in {2, 3, n}
            if 2 <= a <= max(2, n) and tuner.allows(LayerPlan(n, s, a))
        ]  # fmt: skip
        best = min(map(device.time, every))
        worst = max(worst, device.time(found) / best)
        assert device.time(found) <= 1.03 * best, (vars(device), found, min(every, key=device.time))
        assert not tuner.allows(STOCK) or device.time(found) <= device.time(STOCK)
        tried.append(len(set(job.trials)))
    print(f"{sum(tried) / len(tried):.1f} plans tried, at most {max(tried)}; worst {worst:.3f}")


def test_other_orders_of_the_best_are_tried() -> None:
    def time(plan: LayerPlan) -> float:
        return 9 if plan.chunks != 8 else 5 - plan.lookahead / 10

    job = Job(SearchSpace.of("auto", "none"))
    assert job.run(time, 10) == LayerPlan(8, lookahead=8)
    assert [p.lookahead for p in job.trials if p.chunks == 8] == [2, 3, 8]
    assert not any(p.lookahead > 2 for p in job.trials if p.chunks != 8)


def test_a_plan_must_be_faster_than_a_simpler_one_by_the_margin() -> None:
    for gain, chunks in ((0.01, 1), (0.04, 4)):
        job = Job(SearchSpace.of("auto", "none"))
        assert job.run(by_chunks(1.0, 1.2, 1.0 - gain, 1.1), 10).chunks == chunks


def test_ranks_agree_whatever_their_clocks_read() -> None:
    rng = random.Random(3)
    job = Job(SearchSpace.of(), budget=peak(LayerPlan.of(4, "s4"), 1600))
    for _ in range(300):
        job.step(
            lambda plan: rng.uniform(1, 2),
            tokens=rng.choice((400, 512, 700)),
            rows=rng.choice((500, 1000, 1400)),
            calls=rng.choice((1, 2, 4)),
            noise=lambda rank, plan: rng.uniform(0.5, 2),
        )
    assert len(set(job.trials)) > 5  # ``step`` compares all ranks every time


def test_with_times_of_their_own_they_would_not() -> None:
    """What the test above is worth."""
    tuners = [Tuner(SearchSpace.of("auto", "none"), None, Costs(), lambda line: None) for _ in "ab"]
    plans = []
    for step in range(12):
        for rank, tuner in enumerate(tuners):
            time = by_chunks(3, 2, 1, 4)(tuner.plan) if rank else by_chunks(1, 2, 3, 4)(tuner.plan)
            tuner.begin_step(StepReport(TOKENS, 0, time if step else 0, 3))
        plans.append({tuner.plan for tuner in tuners})
    assert len(plans[-1]) == 2


def test_the_slowest_rank_counts() -> None:
    job = Job(SearchSpace.of("auto", "none"))
    for _ in range(10):
        found = job.step(
            by_chunks(6, 7, 7, 1),
            noise=lambda rank, plan: 20 if rank == 2 and plan.chunks == 8 else 1,
        )
    assert found.chunks == 1


@pytest.mark.parametrize(("calls", "steps"), [(4, 1), (3, 2), (2, 2), (1, 4)])
def test_steps_of_a_trial(calls: int, steps: int) -> None:
    """With few calls a step a plan is tried for several; the first of all warms up."""
    job = Job(SearchSpace.of("auto", "none"))
    job.run(by_chunks(9, 8, 5, 8), 40, calls=calls)
    assert [job.trials.count(LayerPlan(n)) for n in (1, 2, 4, 8)] == [steps] * 4


def test_the_only_call_of_a_first_step_does_not_count() -> None:
    job = Job(SearchSpace.of("2", "none"), costs=Costs())
    for time in (1, 9, 8, 7):
        job.step(lambda plan, t=time: t, calls=1)
    job.step(lambda plan: 5, calls=1)
    assert job.tuners[0].costs.times[largest(bucket(TOKENS))] == {LayerPlan(2): 7}


def test_a_trial_without_a_time_ends() -> None:
    """No clock is read where the layer's input wants no gradient."""
    job = Job(SearchSpace.of("auto", "none"))
    assert job.run(lambda plan: 0, 40) == STOCK
    assert len(job.trials) == 4 * autotune.MOST_STEPS


def test_n_follows_the_tokens() -> None:
    """Few tokens want few chunks; each bucket is tried once, and known when it comes again."""
    job = Job(SearchSpace.of("auto", "none"))
    small, large = by_chunks(1, 2, 3, 4), by_chunks(4, 3, 1, 2)
    assert job.run(small, 10, tokens=64) == STOCK
    assert job.run(large, 10, tokens=4096).chunks == 4
    trials = len(job.trials)
    assert job.run(small, 3, tokens=64) == STOCK
    assert job.run(large, 3, tokens=4096).chunks == 4
    assert len(job.trials) == trials


def test_what_changes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "RECHECK_STEPS", 10)
    job = Job(SearchSpace.of("auto", "none"))
    assert job.run(by_chunks(4, 3, 1, 2), 12).chunks == 4
    for _ in range(30):
        found = job.step(by_chunks(0.5, 3, 2, 2))
    assert found == STOCK
    assert len(job.trials) < 30


@pytest.mark.parametrize("rows", [500, 1000])
def test_every_plan_keeps_the_budget(rows: int) -> None:
    """In each call of each step, stock's layer included; what keeps it is tried."""
    budget = peak(LayerPlan(8), 1000)
    job = Job(SearchSpace.of(), budget)
    for _ in range(40):
        assert peak(job.step(by_chunks(9, 7, 5, 8), rows=rows), rows) <= budget
    kept = [plan for plan in SearchSpace.of().plans() if peak(plan, rows * 9 // 8) <= budget]
    for plan in kept:
        if plan == job.trials[0]:
            continue  # which needs least, before rows are known
        enough = [
            one
            for one in (Strategy.NONE, Strategy.S0)
            if LayerPlan(plan.chunks, one) in kept
            and LayerPlan(plan.chunks, one) != STOCK
            and peak(LayerPlan(plan.chunks, one, 8), rows * 9 // 8) <= budget
        ]
        order = list(Strategy)
        tried = not enough or order.index(plan.strategy) <= order.index(enough[0])
        assert (plan in job.trials) == tried, plan


def test_a_budget_starts_with_what_needs_least() -> None:
    """Before any rows are known, as routing may be uneven."""
    job = Job(SearchSpace.of(), budget=10**9)
    first = job.step(by_chunks(1, 2, 3, 4))
    assert first == min(SearchSpace.of().plans(), key=lambda plan: peak(plan, 1000))
    assert job.run(by_chunks(1, 2, 3, 4), 10) == STOCK


def test_more_rows_than_expected_take_another_plan_at_once() -> None:
    budget = peak(LayerPlan(2), 1200)
    job = Job(SearchSpace.of("auto", "none"), budget)
    assert job.run(by_chunks(9, 2, 3, 4), 10) == LayerPlan(2)
    plan = job.step(by_chunks(9, 2, 3, 4), rows=1500)
    assert plan.chunks == 8
    # And from then on, as its rows may come again.
    assert job.run(by_chunks(9, 2, 3, 4), 10).chunks != 2


def test_a_budget_that_routing_exceeds_is_logged_and_training_goes_on() -> None:
    job = Job(SearchSpace.of(), peak(LayerPlan.of(8, "s4"), 2000))
    job.run(by_chunks(9, 7, 5, 8), 40)
    assert not any("too small" in line for line in job.log)
    plan = job.run(by_chunks(9, 7, 5, 8), 40, rows=9000)
    assert plan.chunks == 8 and plan.strategy is not Strategy.NONE
    assert sum("too small" in line and "training goes on" in line for line in job.log) == 1


def test_an_earlier_runs_times_are_not_taken_again() -> None:
    first = Job(SearchSpace.of("auto", "none"))
    found = first.run(by_chunks(9, 7, 5, 8), 10)
    text = next(line for line in first.log if "{" in line)
    costs = parse(text[text.index("{") :])
    second = Job(SearchSpace.of("auto", "none"), costs=costs)
    assert second.step(by_chunks(1, 2, 3, 4)) == found
    assert second.trials == []


def test_log_and_summary() -> None:
    job = Job(SearchSpace.of("auto", "none"))
    job.run(by_chunks(9, 7, 5, 8), 20)
    tokens = largest(bucket(TOKENS))
    assert job.log[0].startswith(f"up to {tokens} tokens a rank: trying at most 8 plans, a step")
    assert f"4 chunks, none, lookahead 2; a call takes {5 * tokens:.3f} ms" in job.log[1]
    assert f"Megatron's own layer {9 * tokens:.3f} ms" in job.log[1]
    assert len(job.log) == 3 and "--moe-pipeline-costs" in job.log[2]
    lines = job.tuners[0].summary()
    calls = [int(line.split()[0]) for line in lines]
    assert sum(calls) == 80 and calls == sorted(calls, reverse=True)
    assert "4 chunks, none" in lines[0] and any("Megatron's own layer" in line for line in lines)
