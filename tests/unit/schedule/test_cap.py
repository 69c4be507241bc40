"""v-cap and auto: any memory cap, any costs, and the fastest of everything that fits."""

from __future__ import annotations

import gc
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedule import AUTO, Costs, Placement, check, generate, lower, simulate
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import list_schedule
from megatron_ext.schedule.generators import NAMES
from megatron_ext.schedule.generators.blocks import VEES
from megatron_ext.schedule.generators.cap import _at_equal_times, unit_bound, v_cap_limits
from megatron_ext.schedule.generators.request import Request
from megatron_ext.schedule.tasks import Tasks
from tests.support.grids import sampled
from tests.support.schedules import made

UNEQUAL = Costs.of(1, "1.3", "0.6", "0.05")


@pytest.mark.parametrize("pp", sampled([*range(2, 10), 12], (2, 3, 5)))
def test_unit_costs_at_every_cap(pp: int) -> None:
    """At most one chunk unit above what no schedule can beat, and never more with more memory."""
    low, high = v_cap_limits(pp)
    for m in (2 * pp, 3 * pp + 1) if pp < 9 else (2 * pp,):
        before = None
        for cap in range(low, high + 1):
            run = simulate(generate("v-cap", pp, m, memory_cap=cap))
            units = 2 * run.makespan
            assert unit_bound(pp, m, cap) <= units <= unit_bound(pp, m, cap) + 1
            assert max(run.peak_sets) <= cap
            assert before is None or units <= before
            before = units


@pytest.mark.parametrize("pp", sampled([17, 25, 32], (17,)))
def test_unit_costs_at_some_caps_of_long_pipelines(pp: int) -> None:
    low, _ = v_cap_limits(pp)
    for cap in (low + 1, pp + 2, 5 * pp // 3 - 1):
        units = 2 * simulate(generate("v-cap", pp, 2 * pp, memory_cap=cap)).makespan
        assert units <= unit_bound(pp, 2 * pp, cap) + 1


@pytest.mark.parametrize("pp", sampled(range(17, 33), (17, 24)))
def test_long_pipelines_have_the_named_orders_first_at_equal_times(pp: int) -> None:
    """So a search takes them from there, and makes them once."""
    vee = Placement.vee(pp)
    for name in VEES.values():
        for m in (2 * pp, 4 * pp + 1):
            request = Request(vee, m, Durations.unit(vee))
            assert _at_equal_times(request, name.cap(pp)).rows == name.rows(pp, m)


@pytest.mark.parametrize("pp", sampled([*range(2, 20), 24, 29, 32], (2, 3, 5, 8)))
def test_the_named_orders_repeat_their_steady_state(pp: int) -> None:
    """They are the list schedules of their blocks, of which only few microbatches are scheduled."""
    for vee in VEES.values():
        block = vee.block(pp)
        for m in (3 * pp, 3 * pp + 1, 5 * pp + 2):
            tasks = block.table(m)
            listed = list_schedule(tasks, block.rows(tasks), [vee.cap(pp)] * pp)
            assert vee.rows(pp, m) == listed, m


def test_few_microbatches() -> None:
    for pp in (2, 3):
        low, high = v_cap_limits(pp)
        for m in range(pp, 2 * pp):
            for cap in range(low, high + 1):
                units = 2 * simulate(generate("v-cap", pp, m, memory_cap=cap)).makespan
                assert units <= unit_bound(pp, m, cap) + 1
    assert 2 * simulate(generate("v-cap", 4, 4, memory_cap=6)).makespan == 29


def test_unit_bound_knows_what_the_last_rank_needs() -> None:
    """p=8, k=13: max(6m+6p-3k-1, 6m+p-1) would promise 2 chunk units less than possible."""
    assert unit_bound(8, 16, 13) == 6 * 16 + 3 * 8 - 1 - 13
    assert unit_bound(8, 16, 16) == 6 * 16 + 8 - 1
    assert unit_bound(8, 16, 10) == 6 * 16 + 6 * 8 - 3 * 10 - 1


STEADY = [
    ((1, "1.3", "0.6", "0.05"), 6, Fraction(0)),
    ((1, "1.3", "0.6", "0.05"), 4, Fraction(27, 100)),
    ((1, "1.2", "0.8"), 4, Fraction(14, 100)),
]


@pytest.mark.usefixtures("some_effort")
@pytest.mark.parametrize(("cost", "cap", "most"), sampled(STEADY, STEADY[2:]))
def test_steady_state_at_unequal_costs(
    cost: tuple[float | str, ...], cap: int, most: Fraction
) -> None:
    """Excess over F+B+W per microbatch; the published orders leave 3.4 %, 41 % and 20 %."""
    costs = Costs.of(*cost)
    few, many = (
        simulate(generate("v-cap", 4, m, costs=costs, memory_cap=cap)).makespan for m in (36, 60)
    )
    work = costs.forward + costs.backward_input + costs.backward_weight
    assert (many - few) / 24 / work - 1 <= most


# Random requests are in test_properties.
@pytest.mark.matrix
@pytest.mark.parametrize(("pp", "m"), [(3, 7), (4, 8)])
def test_never_slower_than_named_orders_or_smaller_caps(pp: int, m: int) -> None:
    named = [(n, generate(n, pp, m)) for n in ("v-min", "v-half", "v-zb")]
    low, high = v_cap_limits(pp)
    heavy = Costs.of(hop="0.1", stages=[(1, 1, 1)] * (2 * pp - 1) + [("1.5", "1.5", "1.5")])
    for costs in (UNEQUAL, heavy):
        before = None
        for cap in range(low, high + 1):
            schedule = generate("v-cap", pp, m, costs=costs, memory_cap=cap)
            run = simulate(schedule)
            assert max(check(schedule).peak_sets) <= cap
            for _, fixed in named:
                if max(simulate(fixed).peak_sets) <= cap:
                    assert run.makespan <= simulate(fixed, costs).makespan
            assert before is None or run.makespan <= before
            before = run.makespan


HEAVY = Costs.of(hop="0.05", stages=[(2, 2, 2)] * 7 + [(3, 3, 3)])


@pytest.mark.parametrize("costs", [UNEQUAL, HEAVY], ids=["uniform", "heavy last"])
def test_never_slower_than_the_named_schedules(costs: Costs) -> None:
    """Their searches are others than those for a cap; with few microbatches a larger cap's fits."""
    for m in (3, 9):
        named = [
            simulate(generate(name, 4, m, costs=costs)) for name in ("v-min", "v-half", "v-zb")
        ]
        for cap in (4, 6, 8):
            run = simulate(generate("v-cap", 4, m, costs=costs, memory_cap=cap))
            for other in named:
                assert max(other.peak_sets) > cap or run.makespan <= other.makespan


def test_heavy_last_stage_is_planned_for() -> None:
    """Output layer and loss: the order for equal costs is measurably slower."""
    costs = Costs.of(stages=[(1, 1, 1)] * 7 + [("1.5", "1.5", "1.5")])
    blind = simulate(generate("v-cap", 4, 16, memory_cap=8), costs).makespan
    assert simulate(generate("v-cap", 4, 16, costs=costs, memory_cap=8)).makespan < blind - 1


@pytest.mark.matrix
def test_random_requests_are_valid_and_fit() -> None:
    rng = random.Random(1)
    for _ in range(5):
        pp, m = rng.randint(2, 6), rng.randint(1, 14)
        low, high = v_cap_limits(pp)
        cap = rng.randint(low, high)
        costs = Costs.of(*(Fraction(rng.randint(5, 20), 10) for _ in range(3)), hop="0.1")
        schedule = generate("v-cap", pp, m, costs=costs, memory_cap=cap)
        report = check(lower(schedule))
        assert max(report.peak_sets) <= cap
        work = costs.forward + costs.backward_input + costs.backward_weight
        # The last rank: the way there, and all its work.
        ahead = (pp - 1) * (costs.forward / 2 + costs.hop)
        assert simulate(schedule).makespan >= m * work + ahead


@pytest.mark.matrix
@pytest.mark.usefixtures("full_effort")
def test_long_runs_repeat_the_steady_state() -> None:
    for cap in (4, 6, 8):
        run = simulate(generate("v-cap", 4, 150, memory_cap=cap))
        assert 2 * run.makespan <= unit_bound(4, 150, cap) + 1
    run = simulate(generate("v-cap", 12, 96, memory_cap=13))
    assert 2 * run.makespan <= unit_bound(12, 96, 13) + 1


ONE_LESS = [(32, "110.95"), (35, "120.1")]


@pytest.mark.usefixtures("full_effort")
@pytest.mark.parametrize(("m", "most"), sampled(ONE_LESS, ()))
def test_one_set_less_than_v_half(m: int, most: str) -> None:
    """Blocks that change their steps once take 117.8 here, and the best of them 127.1 at m=35."""
    costs = Costs.of(1, "1.1", "0.8", "0.05")
    schedule = generate("v-cap", 8, m, costs=costs, memory_cap=9)
    assert max(check(schedule).peak_sets) <= 9
    assert simulate(schedule).makespan <= Fraction(most)


def test_more_effort_shortens_an_order() -> None:
    times = []
    for effort in (0.01, 0.05, 0.25):
        schedule = generate("v-cap", 3, 6, costs=UNEQUAL, memory_cap=5, effort=effort)
        times.append(simulate(schedule).makespan)
    assert times == sorted(times, reverse=True)


OPTIMA = json.loads((Path(__file__).parent / "exact_optima.json").read_text())["rows"]
PROVEN = [case for case in OPTIMA if case["proven"] and case["m"] >= 3]


@pytest.mark.parametrize("case", sampled(PROVEN, PROVEN[::24]), ids=lambda case: str(case)[:60])
def test_near_the_optimum_of_small_cases(case: dict[str, Any]) -> None:
    """Most are met; the worst found is 0.60 % above, one set above V-Min's memory."""
    costs = Costs.of(*case["cost"], case["hop"])
    found = generate("v-cap", case["p"], case["m"], costs=costs, memory_cap=case["cap_sets"])
    least = Fraction(str(case["makespan"]))
    assert least <= simulate(found).makespan <= least * Fraction("1.006")


@pytest.mark.parametrize("cap", [0, 1, 9])
def test_cap_out_of_range(cap: int) -> None:
    with pytest.raises(ValueError, match="v-cap at pp=4 takes a memory cap from 2 .* to 8 .*"):
        generate("v-cap", 4, 8, memory_cap=cap)


def test_auto_takes_the_fastest_that_fits_and_says_why() -> None:
    schedule = made(AUTO, 4, 8)
    assert schedule.name == "interleaved-zb"  # as fast as v-zb, and simpler
    fit = len(NAMES) - 3  # all but interleaved, zb-h2 and dualpipev
    assert f"interleaved-zb is the fastest of {fit} that fit in 4 microbatches" in schedule.note
    assert "next is v-zb, as fast, but less simple; too large: interleaved (5.5)" in schedule.note
    small = made(AUTO, 4, 8, memory_cap=4)
    assert small.name == "v-min"
    assert max(simulate(small).peak_activation) == 2
    times = []
    for cap in range(4, 13):
        best = made(AUTO, 4, 8, memory_cap=cap)
        run = simulate(best)
        assert max(run.peak_activation) <= Fraction(cap, 2)
        times.append(run.makespan)
        for name in ("1f1b", "zb-h1", "v-half", "interleaved-zb", "v-zb", "gis-h", "po"):
            other = simulate(generate(name, 4, 8))
            if max(other.peak_activation) <= Fraction(cap, 2):
                assert run.makespan <= other.makespan
    assert times == sorted(times, reverse=True)


def test_auto_with_other_options() -> None:
    assert made(AUTO, 3, 6, 3).chunks in (1, 2, 3)
    heavy = Costs.of(stages=[(1, 1, 1)] * 7 + [("1.5", "1.5", "1.5")])
    best = made(AUTO, 4, 8, costs=heavy)
    one = Costs.of(stages=[(2, 2, 2)] * 3 + [("2.5", "2.5", "2.5")])
    assert simulate(best).makespan <= simulate(generate("1f1b", 4, 8, costs=one)).makespan


def test_auto_of_some_names() -> None:
    names = ("po", "gis", "zb-h2", "gis-h")
    best = made(AUTO, 4, 8, 3, memory_cap=12, names=names)
    assert (best.name, best.chunks) == ("gis", 3)
    assert best.note.startswith("gis is the fastest of po, gis, zb-h2, gis-h that fit in 4 micro")
    assert best.note.endswith("too large: zb-h2 (7)")
    with pytest.raises(
        ValueError, match=r"none of po, gis.* a cap of 1 micro.* all is 2.667 \(gis"
    ):
        made(AUTO, 4, 8, 3, memory_cap=3, names=names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_cap": 1}, "fits a cap of 0.5 microbatches of activations per rank; the least"),
        ({"group_size": 3}, "auto chooses the group size itself, got 3"),
        ({"chunks": 0}, "auto needs at least 1 chunk per rank, got 0"),
    ],
)
def test_auto_errors(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        made(AUTO, 4, 8, **options)
    assert message in str(error.value)


def test_caches_of_orders_keep_no_tables() -> None:
    """They are many times as large as the orders, and a process may make orders all day."""

    def tables() -> int:
        gc.collect()
        return sum(type(one) is Tasks for one in gc.get_objects())

    before = tables()
    for microbatches in range(5, 17):
        generate("v-half", 2, microbatches, costs=Costs.of(10, 11, 8), effort=0.01)
    assert tables() - before <= 4
