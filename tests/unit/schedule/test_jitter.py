"""The makespan under random pass times."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    Action,
    Costs,
    Link,
    Op,
    Placement,
    Schedule,
    ScheduleSpec,
    check,
    generate,
    lower,
    offload_pass,
    select,
    simulate,
)
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.generators import steadier
from megatron_ext.schedule.jitter import jitter
from megatron_ext.schedule.moves import fits, room_of, states
from megatron_ext.schedule.network import Network
from megatron_ext.schedule.tasks import Tasks
from tests.support.grids import sampled

REAL = Costs.parse("1,1.1,0.8,0.05")


PAIRS = Costs.parse("2,2,1").with_exchange([(1, 1)])
SHARDED = Costs.of(vocabulary=(0.25, 0.25, 0.1, 0.1))


def with_extras() -> list[Schedule]:
    """Joint passes with communication inside, and passes of a sharded vocabulary."""
    pairs = ScheduleSpec("v-half", 4, 8, costs=PAIRS, overlap=True)
    sharded = [ScheduleSpec("v-half", 4, 8, costs=SHARDED, barriers=n) for n in (1, 2)]
    found = [select(spec).schedule for spec in (pairs, *sharded)]
    return [generate("dualpipev", 4, 8, costs=PAIRS), *found]


def test_exact_times_are_the_simulation() -> None:
    named = [generate(name, 4, 8, costs=REAL) for name in ("v-half", "1f1b", "dualpipev")]
    for schedule in (*named, *with_extras()):
        spread = jitter(schedule, 0, 3)
        assert set(spread) == {simulate(schedule).makespan} and spread.ratio == 1


def test_seeded() -> None:
    schedule = generate("v-half", 4, 8, costs=REAL)
    first = jitter(schedule, 0.1, 20, 7)
    assert first == jitter(schedule, Fraction("0.1"), 20, 7) != jitter(schedule, 0.1, 20, 8)
    assert first.exact < first.mean <= first.worst and first.median <= first.p95 <= first.worst
    assert jitter(schedule, 0.05, 20, 7).ratio < first.ratio < jitter(schedule, 0.2, 20, 7).ratio
    only = jitter(schedule, 0.1, 1, 7)
    assert only.mean == only.median == only.p95 == only.worst


def test_mean_and_deviation_of_a_pass() -> None:
    """One microbatch is a chain of six passes of 1 each, so its times are a sum of six."""
    spread = jitter(generate("1f1b", 2, 1), 0.1, 2000)
    assert float(spread.mean) == pytest.approx(6, rel=0.003)
    assert float(spread.p95 - spread.mean) == pytest.approx(1.645 * 0.1 * math.sqrt(6), rel=0.12)


def test_every_order_has_the_same_pass_times() -> None:
    """One microbatch of two placements is the same chain; a rank's order changes no draw."""
    loop = generate("interleaved", 4, 1)
    stages = Placement.vee(4).stages
    passes: dict[int, list[Action]] = {stage: [] for stage in range(8)}
    for _, _, action in loop.actions():
        passes[action.stage].append(action)
    rows = [[*passes[a][:1], *passes[b], *passes[a][1:]] for a, b in stages]
    vee = replace(loop.with_ranks(rows), placement=Placement.vee(4))
    assert check(vee) and jitter(loop, 0.3, 5) == jitter(vee, 0.3, 5)


def test_every_pass_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one factor for all passes and no hops the makespan is multiplied by it: fused and joint
    passes, messages in streams, a hardware queue and offloaded sets included."""

    class Constant:
        def __init__(self, seed: int) -> None:
            pass

        def gauss(self, mean: float, deviation: float) -> float:
            return math.log(1.5)

    monkeypatch.setattr("megatron_ext.schedule.jitter.Random", Constant)
    link = Link.of(4, "0.001")
    v_half = generate("v-half", 4, 8)
    offloaded = offload_pass(v_half, link, "half").schedule
    for schedule, network in (
        (generate("dualpipev", 4, 8), None),
        (generate("1f1b", 4, 8), None),
        (lower(v_half), Network("rank", True)),
        (offloaded, None),
        (lower(offloaded), Network("pair")),
        *((schedule, None) for schedule in with_extras()),
    ):
        spread = jitter(schedule, 0.1, 1, network=network)
        assert spread.exact == simulate(schedule, network=network).makespan
        assert float(spread.ratio) == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(("spread", "runs"), [(-0.1, 5), (2.5, 5), (float("nan"), 5), (0.1, 0)])
def test_bad_input(spread: float, runs: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 2|at least 1 run"):
        jitter(generate("1f1b", 2, 2), spread, runs)


@pytest.mark.usefixtures("full_effort")
@pytest.mark.parametrize(
    ("name", "most"), sampled([("v-half", 0.9997), ("zb-h1", 0.9995)], [("zb-h1", 0.9995)])
)
def test_steadier_orders_are_as_fast_and_as_small(name: str, most: float) -> None:
    """Better with pass times, and with a deviation, that the search did not see."""
    schedule = generate(name, 4, 8, costs=REAL)
    found = steadier(schedule, 0.1)
    assert simulate(found).makespan == simulate(schedule).makespan
    assert max(check(found).peak_sets) == max(check(schedule).peak_sets)
    for spread in (0.05, 0.1):
        means = (float(jitter(one, spread, 200, 7).mean) for one in (found, schedule))
        assert next(means) < most * next(means)
    assert steadier(schedule, Fraction("0.1")) == found
    assert steadier(schedule, 0.1, effort=0) is schedule


@pytest.mark.usefixtures("full_effort")
@pytest.mark.parametrize("stages", [[(0, 1), (2, 3)], [(2, 3), (0, 1)], [(0, 2, 3), (1, 4, 5)]])
def test_steadier_takes_any_placement(stages: list[tuple[int, ...]]) -> None:
    """Also where the first stage of rank r is not stage r."""
    placement, js = Placement(stages), range(8)
    rows = [
        [
            *(Action(Op.F, stage, j) for j in js for stage in row),
            *(Action(Op.B, stage, j) for j in js for stage in reversed(row)),
            *(Action(Op.W, stage, j) for j in js for stage in reversed(row)),
        ]
        for row in stages
    ]
    base = generate("interleaved", 2, 8, placement.chunks, costs=REAL)
    schedule = replace(base, placement=placement).with_ranks(rows)
    found = steadier(schedule, 0.1)
    assert found is not schedule and check(found).peak_sets == check(schedule).peak_sets
    assert simulate(found).makespan <= simulate(schedule).makespan
    assert jitter(found, 0.1, 200, 7).mean < jitter(schedule, 0.1, 200, 7).mean


def test_steadier_leaves_orders_that_it_cannot_move_in() -> None:
    offloaded = offload_pass(generate("v-half", 4, 8), Link.of(4, "0.25"), "half").schedule
    for schedule in (generate("1f1b", 4, 8), generate("dualpipev", 4, 8), offloaded):
        assert steadier(schedule, 0.1) is schedule


def test_steadier_keeps_bytes_of_sets_that_grow() -> None:
    """No rank has more sets between B and W, at any number of sets, than the fullest rank had."""
    schedule = generate("v-half", 4, 12, costs=REAL, sets_grow=True)
    found = steadier(schedule, 0.1)
    assert found is not schedule
    tasks = Tasks(schedule.placement, Durations.unit(schedule.placement), 12)
    before, after = (tasks.rows(one.compute().ranks) for one in (schedule, found))
    held = states(tasks, before)
    assert fits(tasks, after, room_of(held, max(check(schedule).peak_sets)))
