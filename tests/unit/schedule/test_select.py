"""The selector: generation and offload under one cap of what stays on the device."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import (
    AUTO,
    GENERATORS,
    NAMES,
    Costs,
    Link,
    OffloadSpec,
    ScheduleSpec,
    check,
    generate,
    select,
    simulate,
)
from megatron_ext.schedule.generators import sliced
from megatron_ext.schedule.memory_cap import ShareCap, cap_sets
from megatron_ext.schedule.named import CapExceeded
from megatron_ext.schedule.passes.offload import offload
from megatron_ext.schedule.select import ANY_CHUNKS, ONE_CHUNK, placed_alike
from tests.support.grids import sampled

QUARTER = Fraction(1, 4)


def request(name: str, pp: int, m: int, cap: Fraction | None = None, **options: Any) -> Any:
    share = None if cap is None else ShareCap(cap)
    return ScheduleSpec(name, pp, m, cap=share, **options)


def over(pp: int, wanted: str | int = "auto", time: Any = QUARTER) -> OffloadSpec:
    return OffloadSpec(wanted, Link.of(pp, time))


@pytest.mark.parametrize("cap", sampled(["1/4", "1/3", "5/8", "3/4", "1"], ("1",)))
def test_the_largest_that_can_be_brought_under_the_cap(cap: str) -> None:
    """Against trying all caps from V-Min's on; a loosened order may be faster."""
    share, away = Fraction(cap), over(6)
    sets = cap_sets(share, 6, 2)
    fitting = [
        plan
        for size in range(max(sets, 6), 13)
        for order in [generate("v-cap", 6, 18, memory_cap=size)]
        if max((plan := offload(order, away.link, most_sets=sets)).peak_sets) <= sets
    ]
    found = select(request("v-cap", 6, 18, share, offload=away))
    assert not fitting or found.time <= simulate(fitting[-1].schedule).makespan
    assert max(simulate(found.schedule).peak_activation) <= 6 * share
    assert found.plan is not None and found.plan.peak_sets == check(found.schedule).peak_sets
    assert found.schedule.note == found.plan.note


def test_groups_are_as_large_as_offload_allows() -> None:
    """gis, without a group size: against all of them."""
    away, share = over(6, "half"), Fraction(2, 3)
    sets = cap_sets(share, 6, 2)
    plans = {g: offload(generate("gis", 6, 12, group_size=g), away.link, "half") for g in (3, 4, 6)}
    best = max(g for g, plan in plans.items() if max(plan.peak_sets) <= sets)
    assert best > 3
    found = select(request("gis", 6, 12, share, offload=away))
    assert found.schedule.compute().ranks == generate("gis", 6, 12, group_size=best).ranks
    alone = select(request("gis", 6, 12, share, offload=away, group_size=3))
    assert alone.schedule.compute().ranks == generate("gis", 6, 12, group_size=3).ranks


def test_without_a_cap_the_schedule_is_made_as_it_is() -> None:
    base, away = generate("v-half", 4, 8), over(4, "half")
    expected = offload(base, away.link, "half")
    assert select(request("v-half", 4, 8, offload=away)).schedule.ranks == expected.schedule.ranks
    assert select(request("v-half", 4, 8)).schedule == base
    read = select(ScheduleSpec("x.json", 4, 8, offload=away, order=base))
    assert read.schedule.ranks == expected.schedule.ranks


def test_times_decide_what_leaves_and_not_the_order() -> None:
    costs = Costs.of(stages=[[s + 1, 2, 3] for s in range(8)])
    away = over(4, "full", Fraction(1, 2))
    found = select(request("v-half", 4, 8, offload=away, times=costs)).schedule
    assert found.costs == costs
    assert found.compute().ranks == generate("v-half", 4, 8).ranks
    assert found.ranks != select(request("v-half", 4, 8, offload=away)).schedule.ranks


def test_the_answer_is_a_request_by_name() -> None:
    """For other numbers of microbatches: the same schedule and options."""
    caps = Fraction(1), Fraction(7, 8)
    for cap, name, names in zip(caps, ("interleaved-zb", "v-cap"), (NAMES, ("v-half", "v-cap"))):
        found = select(request(AUTO, 4, 8, cap, names=names))
        assert (found.schedule.name, found.spec.name) == (name, name)
        assert select(found.spec).schedule.ranks == found.schedule.ranks
        fewer = select(replace(found.spec, microbatches=3)).schedule
        assert (fewer.name, fewer.placement) == (name, found.schedule.placement)
        assert max(simulate(fewer).peak_activation) <= 4 * cap
    found = select(request(AUTO, 4, 12, Fraction(1, 2), offload=over(4)))
    assert found.spec.offload is not None
    assert select(found.spec).schedule.ranks == found.schedule.ranks


SIZES = [
    (4, 8, 2, Costs(), "1/2"),
    (4, 8, 4, Costs(), "1/2"),
    (4, 8, 2, Costs(), "3/2"),  # more than auto takes without a cap
    (6, 13, 2, Costs(), "3/8"),
    (4, 9, 3, Costs.of(1, "1.2", "0.8", "0.1"), "2/5"),
]


@pytest.mark.parametrize("wanted", ["auto", "half", "1"])
@pytest.mark.parametrize(("pp", "m", "chunks", "costs", "cap"), sampled(SIZES, SIZES[:1]))
def test_auto_with_offload_is_the_fastest_of_all(
    pp: int, m: int, chunks: int, costs: Costs, cap: str, wanted: str
) -> None:
    share, away = Fraction(cap), over(pp, wanted, "0.2")
    spec = request(AUTO, pp, m, share, chunks=chunks, costs=costs, offload=away)
    best = select(spec)
    run = simulate(best.schedule)
    assert max(run.peak_activation) <= share * pp, "in microbatches, however many chunks it has"
    assert best.plan is not None and check(best.schedule).peak_sets == best.plan.peak_sets
    assert best.schedule.note.startswith(f"{best.schedule.name} is the fastest that offload brings")
    assert best.schedule.note.endswith(best.plan.note)
    for name in NAMES:
        try:
            other = select(spec.of(name))
        except CapExceeded:
            continue
        assert run.makespan <= other.time
        if run.makespan == other.time:
            assert NAMES.index(best.schedule.name) <= NAMES.index(name)


def test_auto_below_what_any_schedule_takes_alone() -> None:
    """Of 1F1B's 4 microbatches, 1/4 is 1, the least of ``v-cap``; with offload it is faster."""
    with pytest.raises(CapExceeded, match="the least of all is 1 .v-cap.; raise the cap to 0.25"):
        select(request(AUTO, 4, 8, QUARTER / 2, chunks=4))
    alone = select(request(AUTO, 4, 8, QUARTER, chunks=4))
    found = select(request(AUTO, 4, 8, QUARTER, chunks=4, offload=over(4, time="0.1")))
    for one in (alone, found):
        assert max(simulate(one.schedule).peak_activation) <= 1
    assert alone.schedule.name == "v-cap" and found.time < alone.time


@pytest.mark.parametrize(("cap", "makespan"), [("1/4", 53.5), ("3/8", 53.5), ("1/2", 51.5)])
def test_a_loosened_order_for_offload(cap: str, makespan: float) -> None:
    """The work bound is 51.5; orders made for the memory that they hold take 55, 55 and 53."""
    found = select(request(AUTO, 8, 16, Fraction(cap), offload=over(8, time="0.25")))
    assert found.time == makespan
    assert max(check(found.schedule).peak_activation) <= 8 * Fraction(cap)
    assert found.plan is not None and not found.plan.stall


def test_auto_of_some_names() -> None:
    spec = request(
        AUTO,
        4,
        12,
        Fraction(1, 2),
        costs=Costs.of(1, "1.2", "0.8"),
        names=("zb-h2", "1f1b", "zb-h1"),
        offload=over(4),
    )
    found = select(spec).schedule
    assert found.name == "1f1b"
    assert "too large even so: zb-h2 (7), zb-h1 (4); " in found.note
    with pytest.raises(CapExceeded, match="1f1b at pp=4 with offload auto keeps 2 .* cap is 1"):
        select(replace(spec, cap=ShareCap(QUARTER)))
    with pytest.raises(ValueError, match="cannot offload 2 chunks of a rank that has 1"):
        select(replace(spec, offload=over(4, 2)))


def test_a_cap_that_cannot_be_kept() -> None:
    spec = request("po", 6, 12, Fraction(1, 12), offload=over(6, time=Fraction(1, 2)))
    with pytest.raises(CapExceeded, match="sets on a device, but the cap is 1; raise the") as error:
        select(spec)
    closest = error.value.selected
    assert closest.plan is not None
    most = max(closest.plan.peak_sets)
    assert error.value.what.startswith(f"po at pp=6 with offload auto keeps {most} activation")
    needed = Fraction(error.value.enough)
    assert cap_sets(needed, 6, 2) == most, "what it says is enough"
    select(replace(spec, cap=ShareCap(needed)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (request("v-cap", 4, 8, Fraction(1, 8)), "v-cap at pp=4 takes a memory cap from 2"),
        (request("v-half", 4, 8, QUARTER), "memory of v-half is fixed and takes no memory cap"),
        (request("po", 4, 8, offload=over(4, 3)), "cannot offload 3 chunks of a rank that has 2"),
        (request("po", 4, 8, Fraction(1, 10), offload=over(4)), "give at least 0.125, one set"),
        (request(AUTO, 4, 8, Fraction(1, 10)), "give at least 0.125, one set"),
        (request("nope", 4, 8), "unknown schedule 'nope'; known: 1f1b, .*, auto"),
        (request(AUTO, 1, 8), "auto needs at least 2 pipeline ranks, got pp=1"),
    ],
)
def test_errors(spec: ScheduleSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(spec)


def test_schedules_that_one_model_is_placed_for() -> None:
    vees = [name for name, made in GENERATORS.items() if made.placement == "vee"]
    assert {"v-zb", "v-half", "v-min", "v-cap"} <= set(vees)
    for name in vees:
        assert list(placed_alike(request(name, 4, 8))) == vees
    assert placed_alike(request("1f1b", 4, 8)) == ("1f1b",)
    assert placed_alike(request("zb-h1", 4, 8)) == ("zb-h1", "zb-h2")
    several = placed_alike(request("po", 4, 8, chunks=3))
    assert several == ("interleaved-zb", "gis-h", "gis", "po")


def test_names_that_keep_megatrons_placement() -> None:
    loops = [name for name in NAMES if GENERATORS[name].placement == "loop"]
    one = tuple(name for name in loops if generate(name, 4, 8).chunks == 1)
    assert one == ONE_CHUNK and {*loops} - {*one} == {*ANY_CHUNKS}


@pytest.mark.parametrize("share", [Fraction(3, 10), Fraction(1, 2)])
def test_only_schedules_whose_block_fits_are_searched(
    share: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices every search counts, and most names do not fit a small cap."""
    tried: list[int] = []
    search = sliced.searched

    def counted(*args: Any, **options: Any) -> Any:
        tried.append(args[3])
        return search(*args, **options)

    monkeypatch.setattr(sliced, "searched", counted)
    best = select(request(AUTO, 4, 4, share, slices=(2,) * 4, effort=0.01)).schedule
    assert max(best.peak_activation()) <= share * 4
    fit = int(best.note.split("fastest of ")[1].split()[0])
    searches = sum(work > 0 for work in tried)
    assert 0 < searches <= fit < len(NAMES) - 4
