"""1F1B beside a schedule: as many layers a rank, one after the other."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import Costs, generate, lower, simulate
from megatron_ext.schedule.baseline import promise, stock
from megatron_ext.schedule.costs import merged


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "interleaved"])
def test_equal_costs(name):
    costs = Costs.of(1, 1.1, 0.8, 0.05)
    made = stock(generate(name, 4, 8, costs=costs))
    assert made == generate("1f1b", 4, 8, costs=costs)


def test_the_stages_of_a_rank_become_one():
    """In model order, wherever a V has them."""
    rows = [[s + 1, 2 * s + 1, 1] for s in range(8)]
    costs = Costs.of(stages=rows, hop=1).with_exchange([[0, 1]] * 8)
    made = stock(generate("v-half", 4, 8, costs=costs))
    assert made is not None and made.chunks == 1
    assert made.costs.stages == tuple((4 * r + 3, 8 * r + 4, 2) for r in range(4))
    assert made.costs.exchange == ((0, 2),) * 4
    assert sum(map(sum, rows)) == sum(made.costs.per_rank_work(made.placement))


def test_costs_of_fewer_stages():
    costs = Costs.of(stages=[[s + 1, 2, 3] for s in range(8)]).with_exchange([[1, 1]])
    four = merged(costs, 4)
    assert four is not None and four.stages == tuple((4 * r + 3, 4, 6) for r in range(4))
    assert four.exchange == costs.exchange and merged(four, 1) == merged(costs, 1)
    assert merged(costs, 8) is costs and merged(costs, 3) is None
    by_stage = merged(Costs.of().with_exchange([[1, 0], [2, 1]]), 1)
    assert by_stage is not None and by_stage.exchange == ((3, 1),)
    assert merged(Costs.of(1, 2, 3), 5) == Costs.of(1, 2, 3)


def test_a_promise_is_what_simulate_says():
    plan = generate("v-half", 4, 8)
    made = promise(lower(plan))
    assert made == promise(plan)
    assert (made.bubble, made.peak) == (simulate(plan).bubble, Fraction(3))
    assert (made.bubble_text, made.peak_text) == ("9.4 %", "3")


def test_a_sharded_vocabulary_has_none():
    costs = Costs.of(vocabulary=[1, 1, 1, 1])
    assert stock(replace(generate("v-half", 4, 8), costs=costs)) is None
    assert stock(replace(generate("v-half", 4, 8), barriers=1)) is None
