"""Generation and offload under one cap of what stays on the device."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import AUTO, NAMES, Costs, Link, Schedule, check, generate, simulate
from megatron_ext.schedule.generators.auto import simplest_first
from megatron_ext.schedule.memory_cap import cap_sets
from megatron_ext.schedule.offload_cap import (
    NO_CAP,
    CapNotKept,
    auto_offloaded,
    caps_to_try,
    family,
    generate_offloaded,
)
from megatron_ext.schedule.passes.offload import offload
from tests.support.grids import sampled

QUARTER = Fraction(1, 4)


@pytest.mark.parametrize(
    ("name", "cap", "expected"),
    [
        ("v-half", QUARTER, NO_CAP),
        ("v-cap", None, NO_CAP),
        ("v-cap", QUARTER, range(8, 17)),  # V-Min's to 1F1B's
        ("v-cap", Fraction(3, 4), range(12, 17)),
        ("v-cap", Fraction(2), range(16, 17)),
    ],
)
def test_caps_to_try(name: str, cap: Fraction | None, expected: object) -> None:
    assert caps_to_try(name, 8, cap) == expected


@pytest.mark.parametrize("cap", sampled(["1/4", "1/3", "5/8", "1"], ("1/3", "1")))
def test_the_largest_that_can_be_brought_under_the_cap(cap: str) -> None:
    """Against trying them all; under 1/3 the third cap fits, and the second does not."""
    share, link = Fraction(cap), Link.of(6, QUARTER)
    caps = caps_to_try("v-cap", 6, share)
    made = {sets: generate("v-cap", 6, 18, memory_cap=sets) for sets in caps}
    sets = cap_sets(share, 6, 2)
    fits = [k for k in caps if max(offload(made[k], link, most_sets=sets).peak_sets) <= sets]
    if not fits:
        with pytest.raises(CapNotKept):
            generate_offloaded(made.__getitem__, link, cap=share, caps=caps)
        return
    plan = generate_offloaded(made.__getitem__, link, cap=share, caps=caps)
    assert plan.schedule.compute().ranks == made[fits[-1]].ranks
    assert max(plan.peak_sets) <= sets
    assert plan.peak_sets == check(plan.schedule).peak_sets
    assert plan.schedule.note == plan.note


def test_without_a_cap_the_schedule_is_made_as_it_is() -> None:
    asked, base, link = [], generate(AUTO, 4, 8), Link.of(4, QUARTER)

    def make(sets: int | None) -> Schedule:
        asked.append(sets)
        return base

    plan = generate_offloaded(make, link, "half")
    expected = offload(base, link, "half")
    assert asked == [None]
    note = f"{base.note}; {expected.note}"
    assert plan == replace(expected, schedule=replace(expected.schedule, note=note))


SIZES = [
    (4, 8, 2, Costs(), "1/2"),
    (4, 8, 4, Costs(), "1/2"),
    (4, 8, 2, Costs(), "3/2"),  # more than auto takes without a cap
    (6, 13, 2, Costs(), "3/8"),
    (4, 9, 3, Costs.of(1, "1.2", "0.8", "0.1"), "2/5"),
]


@pytest.mark.parametrize("wanted", ["auto", "half", "1"])
@pytest.mark.parametrize(("pp", "m", "chunks", "costs", "cap"), sampled(SIZES, SIZES[:3]))
def test_auto_is_the_fastest_of_all(
    pp: int, m: int, chunks: int, costs: Costs, cap: str, wanted: str
) -> None:
    share, link = Fraction(cap), Link.of(pp, "0.2")
    best = auto_offloaded(pp, m, chunks, costs, link, wanted, cap=share)
    run = simulate(best.schedule)
    assert max(run.peak_activation) <= share * pp, "in microbatches, however many chunks it has"
    assert check(best.schedule).peak_sets == best.peak_sets
    assert best.schedule.note.startswith(f"{best.schedule.name} is the fastest that offload brings")
    assert best.schedule.note.endswith(best.note)
    for name in NAMES:
        try:
            make, caps = family(name, pp, m, chunks, costs, share)
            other = generate_offloaded(make, link, wanted, cap=share, caps=caps)
        except CapNotKept:
            continue
        time = simulate(other.schedule).makespan
        assert run.makespan <= time
        if run.makespan == time and name != best.schedule.name:
            assert simplest_first([name, best.schedule.name])[1] == name


def test_auto_below_what_any_schedule_takes_alone() -> None:
    """V-Min's 2 microbatches are the least; of 1F1B's 4, 1/4 is 1."""
    with pytest.raises(ValueError, match="the least of all is 2"):
        generate(AUTO, 4, 8, 4, memory_cap=4)
    plan = auto_offloaded(4, 8, 4, Costs(), Link.of(4, "0.1"), cap=QUARTER)
    assert max(simulate(plan.schedule).peak_activation) <= 1


def test_auto_of_some_names_and_for_the_span() -> None:
    costs, link = Costs.of(1, "1.2", "0.8"), Link.of(4, QUARTER)
    options = {"cap": Fraction(1, 2), "names": ("zb-h2", "1f1b", "zb-h1")}
    plan = auto_offloaded(4, 12, 2, costs, link, **options)
    assert plan.schedule.name == "1f1b"
    assert "too large even so: zb-h2 (7), zb-h1 (4); " in plan.schedule.note
    assert auto_offloaded(4, 12, 2, costs, link, objective="span", **options).schedule.note
    with pytest.raises(CapNotKept, match="1f1b at pp=4 with offload auto keeps 2 .* cap is 1"):
        auto_offloaded(4, 12, 2, costs, link, **options | {"cap": QUARTER})
    with pytest.raises(ValueError, match="cannot offload 2 chunks of a rank that has 1"):
        auto_offloaded(4, 12, 2, costs, link, 2, **options)


def test_a_cap_that_cannot_be_kept() -> None:
    link = Link.of(6, Fraction(1, 2))
    with pytest.raises(CapNotKept, match="sets on a device, but the cap is 1; raise the") as error:
        generate_offloaded(lambda _: generate("po", 6, 12), link, cap=Fraction(1, 12))
    most = max(error.value.plan.peak_sets)
    assert error.value.what.startswith(f"po at pp=6 with offload auto keeps {most} activation")
    needed = Fraction(error.value.needed)
    assert cap_sets(needed, 6, 2) == most, "what it says is enough"
    generate_offloaded(lambda _: generate("po", 6, 12), link, cap=needed)


def test_errors_of_others_come_through() -> None:
    link = Link.of(4, QUARTER)

    with pytest.raises(ValueError, match="v-cap at pp=4 takes a memory cap from 4"):
        generate_offloaded(
            lambda sets: generate("v-cap", 4, 8, memory_cap=sets), link, cap=QUARTER, caps=[2, 3]
        )
    with pytest.raises(ValueError, match="cannot offload 3 chunks of a rank that has 2"):
        generate_offloaded(lambda _: generate("po", 4, 8), link, 3)
    with pytest.raises(ValueError, match="give at least 0.125, one set"):
        generate_offloaded(lambda _: generate("po", 4, 8), link, cap=Fraction(1, 10))
