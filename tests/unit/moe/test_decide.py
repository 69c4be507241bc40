"""Decisions while training runs: the same on all ranks, within the budget, and right in the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from megatron_ext.moe.costs import LayerCosts, LayerShape, Line
from megatron_ext.moe.decide import Chooser, Measured, Name, code, load_of
from megatron_ext.moe.layout import Layout
from megatron_ext.moe.memory import Load, footprint
from megatron_ext.moe.search import Settings, bucket, largest
from megatron_ext.moe.select import BudgetError, Space, choose, what_fits
from megatron_ext.moe.settings import Way

SHAPE = LayerShape(64, 128, "swiglu", top_k=2, ranks=4)
COSTS = LayerCosts(*[Line(1e-6, 0.01)] * 2, *[Line(1e-4, 0.01)] * 2, *[Line(1e-6)] * 2)
KEPT = 6.0 * SHAPE.ffn * SHAPE.element_bytes
RANKS = 3

Times = Callable[[Way, int], float]  # microseconds of a call on a rank


@dataclass
class Clock:
    """A watch that can be read after a few looks."""

    took: float
    late: int

    def microseconds(self) -> int | None:
        self.late -= 1
        return round(self.took) if self.late < 0 else None


class Job:
    """All ranks of a group, each with a chooser of its own."""

    def __init__(self, space: Space, budget: int | None = None, in_flight: int = 2) -> None:
        self.said: list[str] = []
        self.measured: list[int] = []
        self.choosers = [
            Chooser(
                space,
                budget,
                lambda: (2, in_flight),
                self.said.append if rank == 0 else lambda line: None,
                Settings(samples=2, max_trials=40),
            )
            for rank in range(RANKS)
        ]
        self.layers = [chooser.layer(Name(SHAPE, 2), self._measure) for chooser in self.choosers]
        self.trials = 0

    def _measure(self, rows: int) -> Measured:
        self.measured.append(rows)
        return Measured(COSTS, KEPT)

    def call(self, rows: int, times: Times, saves: bool = True, late: int = 0) -> Way:
        """One call of a layer on all ranks; late: how often rank 1's clock cannot be read yet."""
        notes = [layer.outgoing() for layer in self.layers]
        ways = [layer.decide(rows, notes, saves) for layer in self.layers]
        assert len({way[:3] for way in ways}) == 1
        for rank, way in enumerate(ways):
            if way.trial is not None:
                assert saves
                if way.trial.weighs:
                    way.trial.weighed(1000, rows - rank)
                way.trial.timed(Clock(times(way, rank), late if rank == 1 else 0))
        self.trials += ways[0].trial is not None
        return ways[0]


def by_chunks(**times: float) -> Times:
    return lambda way, rank: times[f"n{way.chunks}"]


FASTEST_4 = by_chunks(n1=9000, n2=7000, n4=5000, n8=8000)


@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_measured_times_decide(best: int) -> None:
    """Whatever the simulator says, the fastest stays, and trials end."""
    job = Job(Space.of("auto", "none"))

    def times(way: Way, rank: int) -> float:
        return 5000 if way.chunks == best else 9000

    for _ in range(60):
        job.call(1000, times)
    assert job.layers[0].settled(1000)
    assert job.call(1000, times).chunks == best
    assert job.trials <= 9 * 3
    assert job.measured == [1000] * RANKS


def test_ranks_agree_whatever_their_clocks_say() -> None:
    rng = random.Random(3)
    job = Job(Space.of("auto", "auto"), budget=900_000)
    for _ in range(200):
        rows = rng.choice((500, 900, 1000, 1400))
        job.call(rows, lambda way, rank: rng.uniform(4000, 9000), late=rng.randrange(4))
    assert job.trials > 10  # ``call`` compares all ranks every time


def test_the_slowest_rank_counts() -> None:
    job = Job(Space.of("auto", "none"))

    def times(way: Way, rank: int) -> float:
        if way.chunks == 8:
            return 20_000 if rank == 2 else 1000
        return 6000 + way.chunks

    for _ in range(60):
        way = job.call(1000, times)
    assert way.chunks != 8


def test_recomputed_passes_are_cut_as_the_first_ones() -> None:
    """A pass without gradients is the first half of a recomputed one: nothing is tried then."""
    job = Job(Space.of("auto", "none"))
    ways = [job.call(1000, FASTEST_4, saves=number % 2 == 1) for number in range(40)]
    assert job.trials == 0 and len(set(ways)) == 1


def test_it_starts_with_the_predicted_one() -> None:
    job = Job(Space.of("auto", "none"))
    found = job.call(1000, FASTEST_4, saves=False)
    rows = largest(bucket(1000))
    shape = replace(SHAPE, kept_per_ffn=6.0)
    best = choose(shape, Load(rows, 2, 2), COSTS, None, Space.of("auto", "none"))
    assert found.chunks == best.layout.chunks > 1


def test_every_way_keeps_the_budget() -> None:
    budget = 1_200_000
    job = Job(Space.of("auto", "auto"), budget)
    shape, used = replace(SHAPE, kept_per_ffn=6.0), set()
    for rows in (1000,) * 60 + (1400,) * 60:
        way = job.call(rows, FASTEST_4)
        used.add(way.strategy.value)
        space = Space.of(way.chunks, way.strategy.value)
        layout = next(one for one in space.layouts(way.strategy.value) if one.ahead == way.ahead)
        load = load_of(largest(bucket(rows)), 2, 2)
        assert footprint(shape, load, layout).peak_bytes <= budget
    assert "none" not in used


def test_a_budget_that_routing_exceeds_is_told_and_training_goes_on() -> None:
    load = load_of(largest(bucket(1000)), 2, 2)
    least = Layout(8, "s4")
    budget = footprint(replace(SHAPE, kept_per_ffn=6.0), load, least).peak_bytes * 2
    job = Job(Space.of("auto", "auto"), budget)
    job.call(1000, FASTEST_4)
    assert not any("too small" in line for line in job.said)
    way = job.call(9000, FASTEST_4)
    assert way.chunks == 8 and way.strategy.value in ("s3", "s4")
    assert sum("too small" in line and "training goes on" in line for line in job.said) == 1


def test_more_rows_than_before_are_planned_for_once() -> None:
    job = Job(Space.of("auto", "auto"), budget=2_000_000)
    first = job.call(100, FASTEST_4).strategy
    assert first.value == "none"
    job.call(4000, FASTEST_4)
    assert job.call(100, FASTEST_4).strategy.value != "none"  # its buffers are there by now


def test_log_has_a_line_per_change_and_a_summary() -> None:
    job = Job(Space.of("auto", "none"))
    for _ in range(80):
        job.call(1000, FASTEST_4)
    assert len(job.said) <= 2 and "predicted" in job.said[0]
    assert "4 chunks, none" in job.said[-1]
    assert "5.000 ms measured" in job.said[-1] and "1000 measured" in job.said[-1]
    lines = job.choosers[0].summary()
    calls = [int(line.split()[0]) for line in lines]
    assert sum(calls) == 80 and calls == sorted(calls, reverse=True)
    assert "4 chunks, none" in lines[0]
    assert "1 calls" not in " ".join(lines)


def test_codes_tell_layouts_apart() -> None:
    for strategy in ("none", "s1", "s4"):
        layouts = list(Space.of("auto", strategy).layouts(strategy))
        codes = [code(layout) for layout in layouts]
        assert len(set(codes)) == len(codes) == 8
        assert {layout.chunks for layout in layouts} == {1, 2, 4, 8}


def test_a_budget_that_nothing_keeps() -> None:
    """Known before anything is measured."""
    space, load = Space.of("auto", "auto"), load_of(1000, 2, 2)
    with pytest.raises(BudgetError) as error:
        what_fits(SHAPE, load, 1000, space)
    least = error.value.needed_bytes
    assert len(what_fits(SHAPE, load, least, space)) >= 1
    with pytest.raises(BudgetError):
        what_fits(SHAPE, load, least - 1, space)
