"""The offload pass: S1 to S9 of what PipeOffload's scheduler must keep, on any schedule."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest

from megatron_ext.schedule import (
    GENERATORS,
    NAMES,
    Action,
    Costs,
    Link,
    OffloadPlan,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    check,
    forward_only,
    generate,
    lower,
    simulate,
)
from megatron_ext.schedule.effects import passes
from megatron_ext.schedule.generators.blocks import gis_peak
from megatron_ext.schedule.io import load, save
from megatron_ext.schedule.passes.offload import FULL, SHORT, SPARE, offload, wanted_chunks
from tests.support.grids import sampled

JOURNEY = (Op.OFFLOAD, Op.RELEASE, Op.PREPARE, Op.RELOAD)


def plan_of(schedule: Schedule, time: str | Fraction, chunks="auto", **options):
    return offload(schedule, Link.of(schedule.pp, time), chunks, **options)


def rest(p: int, v: int, n: int) -> int:
    """Sets that stay on rank 0 of PO with n chunks offloaded (spec, section 1.3), rounded up."""
    return ceil(Fraction(p * (v - n) * (v - n + 1), 2 * v))


def assert_good(plan: OffloadPlan, base: Schedule) -> None:
    """What every plan must be, whatever it was asked for."""
    schedule = plan.schedule
    assert schedule.compute().ranks == base.ranks
    report = check(schedule)  # S4 and S5: order of every set, links, completeness
    assert check(lower(schedule)) == report
    assert report.peak_sets == plan.peak_sets
    stays = [
        len([a for a in passes(row) if a.op is Op.F]) - sum(n)
        for row, n in zip(base.ranks, plan.moved)
    ]
    assert [sum(kept.values()) for kept in plan.kept] == stays
    run = simulate(schedule)
    assert run.makespan - simulate(base).makespan == plan.stall
    for rank in range(base.pp):
        curve = run.memory_curve(rank)
        times = [time for time, _ in curve]
        assert times == sorted(set(times))
        assert (curve[0][0], curve[-1][1]) == (0, 0)
        assert max(sets for _, sets in curve) <= plan.peak_sets[rank]


def test_small_case_by_hand() -> None:
    """Times in quarters. F0.1 may start at 3, and does at 1.75, when the copy of F0.0 has ended."""
    rows = ["F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]
    ranks = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    base = Schedule("hand", Placement.loop(2), 2, ranks)
    plan = plan_of(base, "0.25", "full")
    assert [" ".join(map(str, row)) for row in plan.schedule.ranks] == [
        "F0.0 OFFLOAD0.0 RELEASE0.0 F0.1 PREPARE0.0 RELOAD0.0 OFFLOAD0.1 RELEASE0.1 BW0.0 "
        "PREPARE0.1 RELOAD0.1 BW0.1",
        rows[1],
    ]
    run = simulate(plan.schedule)
    assert (run.scale, run.start[0], run.end[0]) == (4, [0, 7, 16, 28], [4, 11, 24, 36])
    assert run.transfers is not None
    assert [(str(c.action), c.start, c.end) for c in run.transfers.copies[0]] == [
        ("OFFLOAD0.0", 4, 7),
        ("RELOAD0.0", 11, 14),
        ("OFFLOAD0.1", 11, 14),
        ("RELOAD0.1", 24, 27),
    ]
    assert run.transfers.moments[0] == [4, 7, 11, 11, 11, 14, 24, 24]
    assert run.memory_curve(0) == [(0, 1), (7, 1), (11, 2), (14, 1), (24, 1), (36, 0)]
    assert (run.makespan, run.transfers.stall, run.peak_sets) == (9, 0, [2, 1])
    assert run.peak_host_activation == [2, 0]
    assert_good(plan, base)


def test_s1_base_of_gis_is_untouched() -> None:
    """The pass keeps the order, so GIS' closed forms hold where nothing is chosen."""
    for p, v, m, g in ((4, 2, 8, 2), (4, 3, 7, 3), (5, 2, 3, 5)):
        base = generate("gis", p, m, v, group_size=g)
        plan = plan_of(base, "0.25", 0)
        assert plan.peak_sets == simulate(base).peak_sets
        assert all(a <= b for a, b in zip(plan.peak_sets, gis_peak(p, m, v, g)))
        assert plan.schedule == base
        assert sum(plan.kept[0].values()) == plan.kept[0][SPARE] == m * v


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", sampled([2, 4, 5, 8], (2, 5)))
def test_s2_s3_s6_peaks_of_po(p: int, v: int) -> None:
    """Quadratic in what stays, at no cost in time; at most 3 sets with everything offloaded."""
    base = generate("po", p, 4 * p, v)
    for time in ("0.1", "0.25", "0.3"):
        peaks = [max(simulate(base).peak_sets)]
        for n in range(1, v + 1):
            plan = plan_of(base, time, n)
            peaks.append(max(plan.peak_sets))
            assert peaks[-1] <= (rest(p, v, n) + 2 if n < v else 3), (time, n)
            assert plan.stall == 0
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("n", sampled((1, 2, 3, 4), (2,)))
def test_s3_does_not_depend_on_the_number_of_microbatches(n: int) -> None:
    peaks = {max(plan_of(generate("po", 8, m, 4), "0.25", n).peak_sets) for m in (16, 24, 50)}
    assert len(peaks) == 1


def test_s3_slower_links() -> None:
    for p, v in ((4, 2), (8, 2), (4, 4), (8, 4)):
        base = generate("po", p, 3 * p, v)
        for time, n in (("0.4", v // 2), ("0.5", v // 2)):
            assert max(plan_of(base, time, n).peak_sets) <= rest(p, v, n) + 3
        assert max(plan_of(base, "0.4", "full").peak_sets) <= 5


@pytest.mark.parametrize(("p", "m"), sampled([(4, 9), (3, 5)], [(3, 5)]))
@pytest.mark.parametrize("name", NAMES)
def test_s4_s5_every_schedule(name: str, p: int, m: int) -> None:
    base = generate(name, p, m)
    for chunks in ("auto", "half", "full"):
        plan = plan_of(base, "0.25", chunks)
        assert_good(plan, base)
        assert plan.stall == 0 or chunks != "auto"


def test_a_direction_has_one_copy_at_a_time() -> None:
    run = simulate(plan_of(generate("po", 5, 20, 2), "0.4", "full").schedule)
    assert run.transfers is not None
    for row in run.transfers.copies:
        assert [c.start for c in row] == sorted(c.start for c in row)
        for op in (Op.OFFLOAD, Op.RELOAD):
            mine = [c for c in row if c.action.op is op]
            assert all(b.start >= a.end for a, b in itertools.pairwise(mine))


def test_slices_are_offloaded_without_a_stall() -> None:
    base = generate("v-half", 4, 8, costs=Costs.of(7, 11, 13, 1), slices=3)
    plan = plan_of(base, "0.125")
    assert_good(plan, base)
    assert plan.stall == 0 and all(map(any, plan.moved))


def test_s7_scale_changes_nothing() -> None:
    for name in ("po", "v-half", "gis", "1f1b"):
        plans = set()
        for factor in (Fraction(1), Fraction(1, 1000), Fraction(7), Fraction(1234, 1)):
            f, b, w, hop = (Fraction(x) * factor for x in ("1", "0.98", "0.74", "0.05"))
            base = generate(name, 4, 10, costs=Costs.of(f, b, w, hop))
            plan = plan_of(base, "0.37")
            plans.add((plan.schedule.ranks, plan.stall / factor))
        assert len(plans) == 1


@pytest.mark.parametrize(("p", "m"), sampled([(2, 1), (2, 5), (5, 2), (7, 9)], [(2, 5), (5, 2)]))
@pytest.mark.parametrize("name", NAMES)
def test_s8_nothing_is_infeasible(name: str, p: int, m: int) -> None:
    base = generate(name, p, m)
    for time, chunks in (("0.3", "full"), ("2", "full"), ("30", "auto")):
        assert_good(plan_of(base, time, chunks), base)


def test_nothing_travels_that_takes_too_long() -> None:
    plan = plan_of(generate("1f1b", 4, 8), 100)
    assert not any(map(any, plan.moved))
    assert plan.schedule.link is None
    assert {reason for kept in plan.kept for reason in kept} <= {SHORT, SPARE}
    assert "0 activation sets are offloaded; 32 stay" in plan.note


def test_forward_only_keeps_nothing() -> None:
    base = forward_only(Placement.loop(4, 2), 6)
    plan = plan_of(base, "0.25")
    assert plan.schedule.ranks == base.ranks
    check(plan.schedule, forward_only=True)


@pytest.mark.parametrize("requests", sampled((6, 60), (6,)))
def test_random(requests: int) -> None:
    rng = random.Random(5)
    for _ in range(requests):
        name, p, m = rng.choice(NAMES), rng.randint(2, 7), rng.randint(1, 12)
        v = rng.choice([2, 3, 4]) if GENERATORS[name].any_chunks else None
        costs = Costs.of(1, rng.choice(["1", "0.98", "1.5"]), rng.choice(["0.7", 1]), "0.05")
        base = generate(name, p, m, v, costs)
        times = [[rng.choice(["0.05", "0.25", "0.33", 1]) for _ in range(p)] for _ in "ab"]
        link = Link.of(p, *times)
        chunks = rng.choice(["auto", "half", "full", 1])
        plan = offload(base, link, chunks)
        assert_good(plan, base)
        assert plan.stall == 0 or chunks != "auto"
        assert plan == offload(base, link, chunks)


def test_random_orders_with_random_offloads_obey_the_link() -> None:
    """The simulator, not the pass: any complete plan runs, if late, and the checker agrees."""
    rng = random.Random(9)
    for _ in range(20):
        base = generate(rng.choice(NAMES), 4, 6)
        base = base.with_ranks([list(passes(row)) for row in base.ranks])
        rows = []
        for row in base.ranks:
            out = list(row)
            for op, stage, j in row:
                if op is Op.F and rng.random() < 0.5:
                    last = Action(Op.BW if Action(Op.BW, stage, j) in row else Op.B, stage, j)
                    low, high = out.index(Action(Op.F, stage, j)) + 1, out.index(last)
                    spots = sorted(rng.randint(low, high) for _ in JOURNEY)
                    for shift, (spot, step) in enumerate(zip(spots, JOURNEY)):
                        out.insert(spot + shift, Action(step, stage, j))
            rows.append(out)
        schedule = replace(base.with_ranks(rows), link=Link.of(4, "0.7", "0.4"))
        report = check(schedule)
        assert check(lower(schedule)) == report
        assert simulate(schedule).makespan >= simulate(base).makespan


@pytest.mark.parametrize("p", sampled((8, 16)))
def test_v_half_with_offload_is_below_v_min_as_fast_as_v_half(p: int) -> None:
    """At k <= 1 for p = 8 and 16. With 4 ranks V-Min has four sets, and four is what is reached."""
    base, least = generate("v-half", p, 4 * p), simulate(generate("v-min", p, 4 * p)).peak_sets
    for time, most in (("0.25", 4), ("0.5", 6)):
        plan = plan_of(base, time)
        assert simulate(plan.schedule).makespan == simulate(base).makespan
        assert max(plan.peak_sets) <= most < max(least)
    base = generate("v-half", 4, 16)
    assert max(plan_of(base, "0.25").peak_sets) <= 4
    assert max(simulate(generate("v-min", 4, 16)).peak_sets) == 4


def test_more_than_the_link_carries() -> None:
    """Full stalls by about what is too much; auto takes less and does not."""
    base = generate("po", 4, 32, 4)
    full, auto = plan_of(base, 2, "full"), plan_of(base, 2, "auto")
    without = simulate(base).makespan
    assert full.stall > 0 == auto.stall
    assert simulate(full.schedule).makespan < 2.3 * without
    assert max(full.peak_sets) <= max(auto.peak_sets) < max(simulate(base).peak_sets)
    assert any(kept[SPARE] or kept[FULL] for kept in auto.kept)


def test_auto_is_no_worse_than_less_at_any_link() -> None:
    base = generate("po", 8, 32, 4)
    for time in ("0.5", "0.75", 1):
        half, auto = plan_of(base, time, "half"), plan_of(base, time)
        assert half.stall == auto.stall == 0
        assert max(auto.peak_sets) <= max(half.peak_sets)


def test_memory_cap_counts_what_stays() -> None:
    base = generate("v-half", 8, 32)
    before = simulate(base).peak_sets
    for cap in (4, 6, 8, 10):
        plan = plan_of(base, "0.25", most_sets=cap)
        assert max(plan.peak_sets) <= cap
        assert plan.stall == 0
        moved = [sum(row) for row in plan.moved]
        assert all(not n for n, peak in zip(moved, before) if peak <= cap), "no more than needed"
    assert max(plan_of(base, "0.25", most_sets=1).peak_sets) > 1  # says what is left, never raises


def test_of_shares_with_equal_peaks_most_sets_leave() -> None:
    """Chunk 0 of each rank brings the peaks as low as it and most of chunk 1 do."""
    base = generate("po", 2, 4)
    few, more, auto = (plan_of(base, "0.25", chunks) for chunks in (1, Fraction(7, 4), "auto"))
    assert few.peak_sets == more.peak_sets == auto.peak_sets and not auto.stall
    assert sum(map(sum, few.moved)) < sum(map(sum, more.moved)) == sum(map(sum, auto.moved))


def test_a_cap_that_nothing_meets_is_exceeded_least() -> None:
    base = generate("v-half", 4, 8)
    assert max(plan_of(base, "0.25", most_sets=1).peak_sets) == max(plan_of(base, "0.25").peak_sets)


def test_host_holds_what_left() -> None:
    base = generate("1f1b", 4, 8)
    report = check(plan_of(base, "0.1").schedule)
    assert report.peak_host_sets[0] <= 4
    assert report.peak_host_sets[0] + report.peak_sets[0] >= 4
    assert sum(report.offloaded_sets) == simulate(plan_of(base, "0.1").schedule).transfers.sets


def test_a_file_holds_the_plan(tmp_path) -> None:
    schedule = lower(plan_of(generate("po", 4, 8), "0.25", "half").schedule)
    save(schedule, tmp_path / "s.json")
    again = load(tmp_path / "s.json")
    assert again.link == schedule.link
    assert again.fingerprint() == schedule.fingerprint()
    assert check(again) == check(schedule)


def _broken(change) -> str:
    schedule = plan_of(generate("1f1b", 3, 4), "0.1").schedule
    rows = [list(row) for row in schedule.ranks]
    change(rows[0])
    with pytest.raises(ScheduleError) as error:
        check(schedule.with_ranks(rows))
    return str(error.value)


@pytest.mark.parametrize("op", JOURNEY)
def test_every_step_is_needed(op: Op) -> None:
    def change(row):
        row.remove(Action(op, 0, 1))

    text = f"{op.value}0.1 is missing; an offloaded set needs OFFLOAD, RELEASE, PREPARE, RELOAD"
    assert text in _broken(change)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ("F", "OFFLOAD", "OFFLOAD0.1 stands before F0.1; a set's order is F, OFFLOAD, RELEASE,"),
        ("OFFLOAD", "RELEASE", "RELEASE0.1 stands before OFFLOAD0.1"),
        ("RELEASE", "PREPARE", "PREPARE0.1 stands before RELEASE0.1"),
        ("PREPARE", "RELOAD", "RELOAD0.1 stands before PREPARE0.1"),
        ("RELOAD", "BW", "BW0.1 stands before RELOAD0.1"),
    ],
)
def test_every_step_has_its_place(one: str, other: str, text: str) -> None:
    def change(row):
        i, j = (row.index(Action(Op(op), 0, 1)) for op in (one, other))
        row[i], row[j] = row[j], row[i]

    assert text in _broken(change)


def test_simulator_refuses_a_release_without_its_offload() -> None:
    base = generate("1f1b", 2, 2)
    rows = [[*base.ranks[0], Action(Op.RELEASE, 0, 0)], base.ranks[1]]
    with pytest.raises(ScheduleError, match=r"RELEASE0.0 stands before OFFLOAD0.0 or without it"):
        simulate(replace(base.with_ranks(rows), link=Link.of(2, 1)))
    with pytest.raises(ScheduleError, match="does not say how they travel"):
        simulate(base.with_ranks(rows))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, "x"), "an offload time must be a number > 0"),
        ((2, 0), "an offload time must be a number > 0"),
        ((2, [1]), "1 transfer times for pp=2; give one, one a rank, or one a stage"),
        ((2, "1:2:3"), "3 transfer times for pp=2"),
        ((2, "1x0:1"), "must be a number > 0 (and <= 1000), the fraction"),
        ((2, "1x9999:1x9999:1x9999"), "29997 transfer times for pp=2"),
    ],
)
def test_bad_links(arguments, text: str) -> None:
    with pytest.raises(ValueError) as error:
        Link.of(*arguments)
    assert text in str(error.value)


def test_bad_numbers_of_chunks() -> None:
    assert [wanted_chunks(text, 3) for text in ("auto", "half", "full", "1")] == [None, 2, 3, 1]
    with pytest.raises(ValueError, match="cannot offload 4 chunks of a rank that has 3; give 0"):
        wanted_chunks("4", 3)
    with pytest.raises(ValueError, match="must be off, half, full, auto or a number of chunks"):
        wanted_chunks("most", 3)
    with pytest.raises(ValueError, match="3 transfer times a way, but there are 2 ranks with 1 c"):
        offload(generate("1f1b", 2, 2), Link.of(3, 1))


def test_a_time_for_every_stage() -> None:
    placement = Placement.vee(2)
    link = Link.parse(2, "0.25x3:3,1/3:0.5x3")
    assert link.to_host == (Fraction(1, 4),) * 3 + (Fraction(3),)
    assert link.of_stage(placement, 3) == (3, Fraction(1, 2)), "rank 0, its second chunk"
    rows = [[1, 2, 3], [1, 1, 1], [2, 2, 2], [1, 0.5, 0.5]]
    times = link.times(placement, Costs.of(stages=rows).durations(placement))
    scale = times.durations.scale
    assert [Fraction(t, scale) for t in times.to_host] == [1.5, 0.75, 1.5, 6]
    assert [Fraction(t, scale) for t in times.to_device] == [2, 1.5, 3, 1]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("0.25", None),
        ("0.25,0.5", None),
        ("1/3", None),
        ("0.25x4", "0.25"),
        ("0.25:0.25:0.5:0.25", "0.25x2:0.5:0.25"),
        ("0.25x7:2,0.125x8", "0.25x7:2,0.125"),
    ],
)
def test_times_are_read_and_written(text: str, same: str | None) -> None:
    link = Link.parse(4, text)
    assert link.text == (same or text)
    placement = Placement.loop(4, len(link.to_host) // 4)
    again = Link.parse(4, link.text)
    for stage in range(placement.num_stages):
        assert again.of_stage(placement, stage) == link.of_stage(placement, stage)
    if "/" not in text:
        assert Link.from_json(json.loads(json.dumps(link.to_json())), placement) == link


def test_one_time_a_rank_stays_one_a_rank() -> None:
    """Files from before stages had times load, and equal times are written as before."""
    placement = Placement.loop(2, 2)
    data = {"to_host": [0.25, 0.5], "to_device": [0.5, 0.25]}
    link = Link.from_json(data, placement)
    assert link.of_stage(placement, 3) == (Fraction(1, 2), Fraction(1, 4))
    ways = [[link.of_stage(placement, s)[way] for s in range(4)] for way in (0, 1)]
    assert Link.of_stages(placement, *ways).to_json() == data
    with pytest.raises(ValueError, match="6 transfer times a way, but there are 2 ranks with 2 ch"):
        Link.from_json({**data, "to_host": [1] * 6}, placement)


def test_the_last_stages_time_does_not_bind_the_others() -> None:
    """Its sets hold the logits and never travel; with one time a rank the last rank would wait."""
    base = generate("po", 4, 32, 4)
    even, worst, own = (
        offload(base, Link.parse(4, text), "full") for text in ("0.25", "0.25x3:4", "0.25x15:4")
    )
    assert (own.stall, own.peak_sets) == (0, even.peak_sets) and own.moved == even.moved
    assert worst.stall > 0
    assert max(worst.peak_sets) > max(own.peak_sets)
