"""Plans of a run: for equal microbatches, and quick ones for those of one step."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.plan.loads import Load, shares_of_loads
from megatron_ext.schedule import (
    CapExceeded,
    Costs,
    Cut,
    ScheduleSpec,
    check,
    generate,
    lower,
    select,
    simulate,
)
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.planner import Knowledge, Planner, StepUnits, order_for_units

NAMES = ("1f1b", "zb-h1", "interleaved-zb", "v-half", "v-zb", "v-cap")


def units(
    count: int, spread: float = 0.3, seed: int = 1
) -> tuple[tuple[tuple[Fraction, ...], ...], ...]:
    """Shares of microbatches whose lengths have this relative spread."""
    draw = random.Random(seed)
    lengths = [max(64, int(4096 * draw.gauss(1, spread))) for _ in range(count)]
    return shares_of_loads([Load.of([n]) for n in lengths], Load.of([4096]), 4096)


def spec_of(name: str, pp: int = 4, costs: Costs = Costs()) -> ScheduleSpec:  # noqa: B008
    cap = ShareCap(Fraction(6, 10)) if name == "v-cap" else None
    return ScheduleSpec(name, pp, 8, costs=costs, cap=cap)


@pytest.mark.parametrize("name", NAMES)
def test_orders_are_valid_and_a_free_order_is_faster(name: str) -> None:
    own = tuple(sorted(units(16)))
    given = order_for_units(spec_of(name), units(16), free=False)
    free = order_for_units(spec_of(name), own, free=True)
    for order in (given, free):
        check(lower(order))
        assert order.microbatches == 16 and order.costs.units is not None
    assert given.costs.units == tuple(row for rows in units(16) for row in rows)
    assert free.arrangement is not None and sorted(free.arrangement.order) == [*range(16)]
    assert [free.costs.units[place] for place in range(16)] == [
        own[number][0] for number in free.arrangement.order
    ]
    assert simulate(free).makespan < simulate(given).makespan
    if name == "v-cap":
        assert max(given.peak_activation()) <= Fraction(6, 10) * 4


def test_the_same_in_every_process() -> None:
    one, other = (order_for_units(spec_of("v-zb"), units(16), free=False) for _ in range(2))
    assert one.fingerprint() == other.fingerprint()


def test_a_known_order_is_taken_where_it_is_faster() -> None:
    """One that was searched for stages of unequal times, for nearly equal microbatches."""
    stages = [(1, 1, 1)] * 7 + [("1.6", "1.4", "1.2")]
    spec = spec_of("v-half", costs=Costs.of(stages=stages))
    known = generate("v-half", 4, 8, costs=spec.costs, effort=0.3)
    own = units(8, spread=0.01)
    quick, best = (order_for_units(spec, own, False, order) for order in (None, known))
    assert simulate(best).makespan < simulate(quick).makespan
    assert best.ranks == known.ranks and best.costs.units == quick.costs.units


def test_slices_may_differ_in_number() -> None:
    loads = [Load.of([n]) for n in (4096, 1024, 2048, 4096)]
    own = shares_of_loads(loads, loads[0], 4096, (4, 1, 2, 4))
    found = order_for_units(replace(spec_of("v-half"), microbatches=4), own, free=False)
    check(lower(found))
    assert found.slices == (4, 1, 2, 4) and len(found.units) == 11


def test_a_cap_that_holds_no_microbatch_is_refused() -> None:
    loads = [Load.of([n]) for n in (40_960, 512)]
    own = shares_of_loads(loads, Load.of([4096]), 4096)
    with pytest.raises(ValueError, match="takes 10 times the activations of a whole one"):
        order_for_units(spec_of("v-cap"), own, free=False)


def test_steps_keep_the_cap_that_auto_chose_by() -> None:
    """Slices of other numbers, and fewer equal ones, in whose orders more sets are resident."""
    for growth, pp, m, tokens, cap in ((1, 4, 10, 0, "1/2"), ("3/2", 3, 12, 64, "3/5")):
        asked = ShareCap(Fraction(cap), Fraction(growth))
        cut = Cut.of(tokens, 4, Fraction(0), 1) if tokens else None
        spec = ScheduleSpec("auto", pp, m, cap=asked, effort=0.02).sliced(cut)
        planner = Planner(select(spec).spec, asked, cut=cut, chosen=True)
        assert planner.spec.cap is None, "the name alone keeps it, at m equal microbatches"
        third = ((Fraction(1, 3),) * 4,) * 3
        steps = [StepUnits(n) for n in range(1, m + 1)]
        steps += [StepUnits(2 * n, (third, ((Fraction(1),) * 4,)) * n) for n in range(1, m)]
        found = []
        for step in steps:
            with contextlib.suppress(CapExceeded):
                found.append(planner.plan(step))
        assert len(found) > len(steps) // 2 and all(map(asked.fits, found))


def test_one_call_for_equal_and_other_microbatches() -> None:
    """Equal ones are searched for and kept; that order serves steps whose units are nearly equal,
    and measured costs change it where they make it faster."""
    stages = [(1, 1, 1)] * 7 + [("1.6", "1.4", "1.2")]
    planner = Planner(replace(spec_of("v-half", costs=Costs.of(stages=stages)), effort=0.3))
    plan = planner.plan(StepUnits(8))
    assert planner.plan(StepUnits(8)) is plan
    own = units(8, spread=0.01)
    assert planner.plan(StepUnits(8, own, False)).ranks == plan.ranks
    assert planner.plan(StepUnits(16, units(16), True)).arrangement is not None
    slow = Costs.of(stages=[(3, 3, 3), *[(1, 1, 1)] * 7])
    again = planner.plan(StepUnits(8), Knowledge(costs=slow, reorder=True))
    assert again.costs == slow and again.ranks != plan.ranks
    assert again.note.startswith("re-planned for measured times")
