"""Orders of a run, made at once or searched for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    AUTO,
    NAMES,
    Costs,
    Link,
    OffloadSpec,
    Schedule,
    ScheduleSpec,
    check,
    generate,
    simulate,
)
from megatron_ext.schedule.generators.cap import v_cap_limits
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.training import TrainingOrder
from tests.support.grids import KINDS, sampled
from tests.unit.schedule.test_generators import named_cap

COSTS = Costs.parse("10,11,9,1")
# Few and many microbatches, even and odd; the largest that runs have.
SIZES = [(2, 1), (2, 5), (3, 7), (4, 3), (4, 16), (5, 11), (8, 5), (8, 32), (16, 64)]
SLOWER = Fraction(12, 10)  # than a searched order, at most


def quick(name: str, pp: int, m: int, costs: Costs = COSTS, **options: int) -> Schedule:
    return generate(name, pp, m, None, costs, effort=0, **options)


@pytest.mark.parametrize("name", sampled(NAMES, KINDS))
def test_a_quick_order_is_valid_in_the_memory_of_its_name(name: str) -> None:
    for pp, m in SIZES:
        for costs in (COSTS, Costs(), Costs.parse("1,3,1")):
            schedule = quick(name, pp, m, costs)
            assert max(check(schedule).peak_sets) <= named_cap(name, pp, schedule.chunks)
            if pp <= 4 and costs is COSTS:
                assert schedule.ranks == quick(name, pp, m, costs).ranks


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_a_quick_order_keeps_every_cap(pp: int) -> None:
    for cap in range(v_cap_limits(pp)[0], 2 * pp + 1):
        schedule = generate("v-cap", pp, 2 * pp + 1, None, COSTS, memory_cap=cap, effort=0)
        assert max(check(schedule).peak_sets) <= cap


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "m"), sampled([(2, 5), (3, 9), (4, 16), (8, 32)], [(3, 9)]))
def test_it_is_hardly_slower_than_a_searched_one(name: str, pp: int, m: int) -> None:
    searched = simulate(generate(name, pp, m, None, COSTS)).makespan
    assert searched <= simulate(quick(name, pp, m)).makespan <= SLOWER * searched


def test_with_a_vocabulary_offload_and_pairs() -> None:
    spec = ScheduleSpec("v-half", 4, 8, costs=COSTS)
    vocabulary = replace(
        spec, barriers=1, costs=replace(COSTS, vocabulary=tuple(map(Fraction, (2, 3, 1, 1, 0))))
    )
    pairs = replace(
        spec, overlap=True, costs=replace(COSTS, exchange=((Fraction(4), Fraction(4)),))
    )
    offload = replace(
        spec, offload=OffloadSpec("auto", Link.parse(4, "0.2")), cap=ShareCap(Fraction(1, 2))
    )
    for one in (vocabulary, pairs, offload):
        now = TrainingOrder(replace(one, effort=0)).searched()
        later = TrainingOrder(one).searched()
        # Pairs may take one set more, each where they are faster.
        assert max(check(now).peak_sets) <= max(check(later).peak_sets) + one.overlap
        assert (now.barriers, now.has_offload) == (later.barriers, later.has_offload)


def test_names_without_a_search_have_one_order() -> None:
    for name in ("1f1b", "interleaved", "po", "dualpipev"):
        assert quick(name, 4, 9).ranks == generate(name, 4, 9, None, COSTS).ranks


def test_an_order_for_measured_costs() -> None:
    costs = Costs.of(stages=[(3, 4, 2 + s % 2) for s in range(8)])
    spec = ScheduleSpec("v-half", 4, 8, costs=COSTS, times=costs)
    again = ScheduleSpec(AUTO, 4, 8, 2, costs, names=("v-min", "v-half"))
    note = TrainingOrder(spec, again=again).searched().note
    assert note.startswith(("re-planned", "the order stays"))
