"""Generators: published closed forms, memory caps, and validity for every size."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import (
    AUTO,
    GENERATORS,
    NAMES,
    Costs,
    Op,
    Placement,
    Schedule,
    check,
    forward_only,
    generate,
    lower,
    simulate,
)
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import list_schedule
from megatron_ext.schedule.generators import building_block as blocks
from megatron_ext.schedule.generators import cap
from megatron_ext.schedule.generators.blocks import v_half_block, v_zb_block
from megatron_ext.schedule.generators.building_block import vee_block
from megatron_ext.schedule.tasks import Tasks
from tests.support import ROOT
from tests.support.closed_forms import FORMS, gis_bubble, gis_peaks, half_sets, min_sets
from tests.support.grids import RANKS, sampled
from tests.support.schedules import made
from tests.support.work import counted

SIZES = sampled(range(2, 33), (*RANKS, 16))


def named_cap(name: str, pp: int, chunks: int) -> int:
    """The most activation sets that a name stands for."""
    half = -(-pp // 2)
    return {
        "1f1b": pp,
        "interleaved": chunks * pp + pp - 1,
        "zb-h1": pp,
        "zb-h2": 2 * pp - 1,
        "interleaved-zb": chunks * pp,
        "v-min": min_sets(pp),
        "v-half": half_sets(pp),
        "v-zb": 2 * pp,
        "v-cap": 2 * pp,
        "dualpipev": 2 * pp + 1,
        "gis": chunks * pp,
        "gis-h": half * (chunks - 1) + pp,
        "po": half * (chunks - 1) + (chunks - 1) * math.gcd(chunks, half) // chunks + pp,
    }[name]


def microbatch_counts(pp: int) -> list[int]:
    if pp > 16:
        return [2 * pp]
    return [2 * pp, 2 * pp + 1, 3 * pp - 1, 5 * pp] if pp < 12 else [2 * pp, 3 * pp - 1]


@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize(
    ("name", "chunks"), [(name, v) for name, form in FORMS.items() for v in form.chunks]
)
def test_closed_forms(name: str, chunks: int | None, pp: int) -> None:
    """Also where p does not divide m, but for interleaved 1F1B."""
    form = FORMS[name]
    counts = microbatch_counts(pp) if form.least > 1 else [pp, pp + 1, *microbatch_counts(pp)]
    for m in [pp, 2 * pp, 3 * pp] if form.multiple else counts:
        run = simulate(generate(name, pp, m, chunks))
        assert run.makespan == form.makespan(pp, m, run.schedule.chunks), m
        if m > pp or not form.multiple:
            assert max(run.peak_activation) == form.peak(pp, run.schedule.chunks), m
        if name in ("zb-h2", "v-zb") and m >= 2 * pp:
            assert run.span_bubble == 0
        if name == "zb-h1":
            assert run.peak_activation == [pp] * pp
        if name == "1f1b":
            assert run.peak_activation == [pp - rank for rank in range(pp)]


@pytest.mark.parametrize("pp", RANKS)
def test_1f1b_with_few_microbatches(pp: int) -> None:
    for m in (1, pp - 1):
        run = simulate(generate("1f1b", pp, m))
        assert run.makespan == FORMS["1f1b"].makespan(pp, m, 1)
        assert run.peak_activation == [min(m, pp - rank) for rank in range(pp)]


def test_zb_h2_and_interleaved_zb_where_their_memory_just_fits() -> None:
    """The fewest microbatches for which the closed form holds."""
    for pp in RANKS:
        for name, m in (
            ("zb-h2", 2 * pp - 1),
            *(("interleaved-zb", m) for m in range(2 * pp, 3 * pp)),
        ):
            run = simulate(generate(name, pp, m))
            assert run.makespan == FORMS[name].makespan(pp, m, run.schedule.chunks)


def test_a_long_run_takes_the_fastest_of_a_few_list_schedules() -> None:
    """Of smaller groups; those of whole groups take 704.55."""
    run = simulate(generate("interleaved-zb", 16, 160, 4, Costs.of(1, 2, 1, "0.2")))
    assert run.makespan == Fraction("670.15")
    assert max(run.peak_activation) == 16


@pytest.mark.parametrize("pp", sampled(range(2, 8)))
def test_gis_memory_and_bubble(pp: int) -> None:
    """PipeOffload's closed forms (specs: CF1 and CF2), for every group size."""
    for group in range(-(-pp // 2), pp + 1):
        for chunks in (2, 3):
            for m in (group, 4 * group):
                for cost in ((1, 1, 1), (2, 3, 1), (1, 1, 2), (2, 4, 3)):
                    costs = Costs.of(*(chunks * x for x in cost))
                    schedule = generate("gis", pp, m, chunks, group_size=group)
                    run = simulate(schedule, costs)
                    assert run.peak_sets == gis_peaks(pp, m, chunks, group)
                    bubble = gis_bubble(pp, group, chunks, costs)
                    assert run.makespan - m * chunks * sum(cost) == bubble
            for m in range(1, 3 * group, 1 if pp < 6 else 3):
                run = simulate(generate("gis", pp, m, chunks, group_size=group))
                most = gis_peaks(pp, m, chunks, group)
                assert all(x <= y for x, y in zip(run.peak_sets, most))
    half = -(-pp // 2)
    assert generate("gis-h", pp, 9).ranks == generate("gis", pp, 9, group_size=half).ranks
    assert generate("gis", pp, 9).ranks == generate("gis", pp, 9, group_size=pp).ranks


@pytest.mark.parametrize("pp", sampled(range(2, 10)))
def test_po_memory(pp: int) -> None:
    half = -(-pp // 2)
    for chunks in (2, 3, 4, 6):
        m = 2 * pp + 1
        inner = half * (chunks - 1) + (chunks - 1) * math.gcd(chunks, half) // chunks
        run = simulate(generate("po", pp, m, chunks))
        assert run.peak_sets == [min(m * chunks, inner + pp - i) for i in range(pp)]


COSTS = [
    Costs.of(1, "1.3", "0.6", "0.05"),
    Costs.of(1, "0.98", "0.74"),
    Costs.of(2, 1, 1, "0.3"),
    Costs.of(1, 3, "0.5", "0.1"),
]


SHAPED = [(name, *size) for name in NAMES if name != "v-cap" for size in ((2, 5), (4, 4), (5, 11))]
# On four ranks these two are searched for longest; v-zb is by default.
LONG = [(name, 4, 4) for name in ("v-min", "v-half")]


@pytest.mark.parametrize(
    ("name", "pp", "m"), sampled(SHAPED, [x for x in SHAPED if x[1] < 5 and x not in LONG])
)
def test_never_slower_than_the_order_for_equal_costs(name: str, pp: int, m: int) -> None:
    """Same memory, and faster or equal under every costs: also one heavy stage at the end."""
    fixed = generate(name, pp, m)
    n = fixed.placement.num_stages
    heavy = Costs.of(hop="0.1", stages=[(1, 1, 1)] * (n - 1) + [("1.5", "1.5", "1.5")])
    for costs in (*COSTS, heavy):
        shaped = generate(name, pp, m, costs=costs)
        check(shaped)
        assert simulate(shaped).makespan <= simulate(fixed, costs).makespan
        cap = named_cap(name, pp, fixed.chunks)
        assert max(simulate(shaped).peak_sets) <= cap


# (p, m, costs, hop), then interleaved-zb, v-zb, and with torch 2.15.0 its InterleavedZeroBubble and
# ZBVZeroBubble under the same costs and memory (benchmarks/torch_lists.py).
AGAINST_TORCH = [
    (4, 8, "1,1,1", "0.05", "26.3", "25.95", "26.3", "26.15"),
    (4, 8, "1,0.98,0.74", "0", "23.62", "23.26", "23.62", "23.28"),
    (4, 8, "1,0.98,0.74", "0.05", "24.42", "23.68", "24.42", "23.9"),
    (4, 8, "1,1.1,0.8", "0.1", "26.55", "25.85", "26.75", "26.15"),
    (4, 8, "1,1.3,0.6", "0", "25.75", "25.15", "25.75", "25.3"),
    (4, 8, "heavy", "0.05", "63.35", "60.3", "63.5", "61.95"),
    (4, 16, "1,0.98,0.74", "0.05", "45.95", "45.44", "46.18", "45.66"),
    (4, 16, "1,1.1,0.8", "0.1", "49.65", "49.05", "49.95", "49.35"),
    (8, 16, "1,1,1", "0.05", "53.2", "52.55", "53.3", "53.15"),
    (8, 16, "1,0.98,0.74", "0.05", "49.47", "48.34", "49.66", "48.66"),
    (8, 16, "1,1.1,0.8", "0.1", "54.45", "52.9", "54.55", "53.55"),
    (8, 16, "heavy", "0.05", "127.75", "120.7", "128.1", "126.55"),
]


@pytest.mark.usefixtures("full_effort")
@pytest.mark.parametrize(
    ("pp", "m", "cost", "hop", "loop", "vee", "torch_loop", "torch_vee"),
    sampled(AGAINST_TORCH, [row for row in AGAINST_TORCH if row[0] == 4]),
)
def test_never_slower_than_torchs_order_of_the_same_placement(
    pp: int, m: int, cost: str, hop: str, loop: str, vee: str, torch_loop: str, torch_vee: str
) -> None:
    stages = [("1", "1", "1")] * (2 * pp - 1) + [("1.5", "1.5", "1.5")]
    costs = Costs.of(hop=hop, stages=stages) if cost == "heavy" else Costs.parse(cost, hop)
    for name, most, rival in (("interleaved-zb", loop, torch_loop), ("v-zb", vee, torch_vee)):
        run = simulate(generate(name, pp, m, costs=costs))
        assert run.makespan <= Fraction(most) <= Fraction(rival)
        assert max(run.peak_activation) <= pp


@pytest.mark.parametrize("name", [*NAMES, AUTO])
def test_scaling_the_costs_changes_nothing(name: str) -> None:
    """Of equal ones, and of those of every stage."""
    stages = 3 * (2 if name == AUTO else GENERATORS[name].default_chunks)
    rows = [(1, Fraction(13, 10), Fraction(6 + s, 10)) for s in range(stages)]
    for hop, own in ((Fraction(0), [(1, 1, 1)] * stages), (Fraction(1, 20), rows)):
        plans = {
            made(
                name, 3, 8, costs=Costs.of(hop=hop * k, stages=[[x * k for x in r] for r in own])
            ).ranks
            for k in (1, 1000, Fraction("1234.5"), Fraction("0.001"))
        }
        assert len(plans) == 1


def test_hash_seed_and_caches_change_nothing() -> None:
    code = (
        "from megatron_ext.schedule import *\n"
        "c = Costs.of(1, '1.3', '0.6', '0.05')\n"
        "print([generate(n, 3, 7, costs=c).fingerprint() for n in NAMES])"
    )
    costs = Costs.of(1, "1.3", "0.6", "0.05")
    plans = {f"{[generate(name, 3, 7, costs=costs).fingerprint() for name in NAMES]}\n"}
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        plans.add(subprocess.check_output(command, env=environment, text=True))
    assert len(plans) == 1


def test_v_half_with_few_microbatches_meets_the_bound_once_memory_binds() -> None:
    for pp in (3, 4, 5, 6, 7, 8, 11, 16):
        k = half_sets(pp)
        for m in range(1, pp):
            makespan = 2 * simulate(generate("v-half", pp, m)).makespan
            if 2 * m > k:
                assert makespan == 6 * m + 6 * pp - 3 * k - 1
            else:
                # All forwards fit in memory; measured, and far below the bound above.
                assert makespan <= 4 * pp + 1 + 4 * (m - 1)


def test_exhaustively_solved_case() -> None:
    """p=m=4 with 6 resident sets: the optimum found by exhaustive search is 29 chunk units."""
    assert 2 * simulate(generate("v-half", 4, 4)).makespan == 29


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", sampled(range(2, 7)))
def test_valid_for_every_microbatch_count(name: str, pp: int) -> None:
    for m in sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 1, 3 * pp + 1}):
        for chunks in (2, 3) if GENERATORS[name].any_chunks else (None,):
            schedule = generate(name, pp, m, chunks)
            report = check(schedule)
            assert max(report.peak_sets) <= named_cap(name, pp, schedule.chunks)
            assert report.peak_sets == simulate(schedule).peak_sets
            assert check(lower(schedule)) == report


LARGER = [(name, *size) for name in NAMES for size in ((13, 5), (16, 33), (32, 9))]


@pytest.mark.parametrize(  # v-cap takes as long as all others together
    ("name", "pp", "m"), sampled(LARGER, [x for x in LARGER if x[1] == 13 and x[0] != "v-cap"])
)
def test_valid_at_larger_sizes(name: str, pp: int, m: int) -> None:
    schedule = generate(name, pp, m)
    costs = Costs.of(1, "0.98", "0.74", "0.1")
    assert check(lower(replace(schedule, costs=costs))) == check(schedule)


def test_interleaved_is_megatrons_order() -> None:
    schedule = generate("interleaved", 2, 2, 2)
    assert " ".join(map(str, schedule.ranks[0])) == "F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1"
    assert " ".join(map(str, schedule.ranks[1])) == "F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1"


def test_zb_h1_steady_state() -> None:
    row = generate("zb-h1", 4, 12).ranks[1]
    at = [str(a) for a in row].index("F1.6")
    assert [str(a) for a in row[at : at + 3]] == ["F1.6", "B1.4", "W1.3"]


@pytest.mark.parametrize("cost", [(1, 1, 1), (1, "0.98", "0.74"), (1, "1.5", "0.5"), ("1.4", 1, 1)])
def test_steady_period_of_v_schedules(cost: tuple[float, float, float]) -> None:
    """V-Half: max(F+B+W, 2F+W/2, 2B+W/2) per microbatch; V-ZB: F+B+W."""
    costs = Costs.of(*cost)
    f, b, w = costs.forward, costs.backward_input, costs.backward_weight
    for pp in (4, 5):
        for name, period in (
            ("v-half", max(f + b + w, 2 * f + w / 2, 2 * b + w / 2)),
            ("v-zb", f + b + w),
        ):
            few, many = (simulate(generate(name, pp, m), costs).makespan for m in (60, 100))
            assert (many - few) / 40 == period


def test_registry() -> None:
    assert tuple(GENERATORS) == NAMES
    for name, generator in GENERATORS.items():
        schedule = generate(name, 3, 4)
        assert schedule.chunks == generator.default_chunks
        assert schedule.placement.is_vee() == (generator.placement == "vee")
        split = any(a.op is Op.W for row in schedule.ranks for a in row)
        assert split == generator.split_backward
        assert generator.description


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", 4, 8), "unknown schedule 'nope'; known: 1f1b, interleaved, zb-h1, "),
        (("1f1b", 1, 8), "at least 2 pipeline ranks, got pp=1"),
        (("v-half", 4, 0), "at least 1 microbatch, got 0"),
        (("1f1b", 4, 8, 2), "1f1b has exactly 1 chunk per rank, got 2; give chunks=1"),
        (("v-zb", 4, 8, 1), "v-zb has exactly 2 chunks per rank, got 1; give chunks=2"),
        (("interleaved", 4, 8, 1), "at least 2 chunks per rank, got 1; use 1f1b for one chunk"),
        (("interleaved", 4, 8, 0), "got 0; give chunks=2 or more"),
    ],
)
def test_errors(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=r".*") as error:
        generate(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "v-half", "group_size": 3}, "v-half has no group size, got 3"),
        (
            {"name": "gis", "group_size": 2},
            "gis at pp=5 takes a group size from 3 (p/2 rounded up)",
        ),
        ({"name": "gis", "group_size": 6}, "to 5 (p), got 6"),
        ({"name": "v-half", "memory_cap": 6}, "the memory of v-half is fixed"),
    ],
)
def test_option_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".*") as error:
        generate(pp=5, microbatches=8, **options)
    assert message in str(error.value)


def test_costs_for_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="costs are given for 3 stages but pp=2 x chunks=2 has 4"):
        generate("v-half", 2, 4, costs=Costs.of(stages=[[1, 1, 1]] * 3))


@pytest.mark.parametrize("name", NAMES)
def test_work_of_a_large_schedule_grows_with_its_passes(name: str) -> None:
    for module in (blocks, cap):  # what earlier tests left there would hide work
        for one in vars(module).values():
            if hasattr(one, "cache_clear"):
                one.cache_clear()
    schedule, calls = counted(lambda: generate(name, 32, 128))
    # Found: 1 to 25 calls a pass; 80 for v-cap, which lists its blocks first.
    assert calls <= (100 if name == "v-cap" else 32) * sum(map(len, schedule.ranks))


PLACEMENTS = [Placement.loop(3), Placement.loop(2, 3), Placement.vee(4), Placement.vee(5)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_forward_only(placement: Placement) -> None:
    for m in (1, 2, 5, 8):
        schedule = forward_only(placement, m)
        assert schedule.name == "forward-only"
        check(schedule, forward_only=True)
        check(lower(schedule), forward_only=True)
        run = simulate(schedule)
        assert run.peak_sets == [0] * placement.pp
        assert run.memory_curve(0) == [(0, 0)]
        # In stage units: all work of a rank, and the way through the pipeline around it.
        assert run.makespan <= m + placement.num_stages


def test_forward_only_finishes_what_is_in_flight_first() -> None:
    rows = [" ".join(map(str, row)) for row in forward_only(Placement.vee(2), 3).ranks]
    assert rows == ["F0.0 F0.1 F0.2 F3.0 F3.1 F3.2", "F1.0 F2.0 F1.1 F2.1 F1.2 F2.2"]
    with pytest.raises(ValueError, match="at least 1 microbatch, got 0"):
        forward_only(Placement.vee(2), 0)


@pytest.mark.parametrize("pp", sampled(range(2, 33), (*RANKS, 32)))
def test_blocks_are_executable_and_fill_their_interval(pp: int) -> None:
    for block in (v_half_block(pp), v_zb_block(pp)):
        for row in block.placement.stages:
            times = [at % 6 for (_, stage), at in block.offsets.items() if stage in row]
            assert sorted(times) == [0, 1, 2, 3, 4, 5]
    stamped = v_half_block(pp).stamp(pp + 1)
    check(Schedule("block", Placement.vee(pp), pp + 1, tuple(map(tuple, stamped))))


def test_v_half_block_is_the_published_one() -> None:
    for pp in (4, 5):
        g = 4 if pp % 2 == 0 else 1
        offsets = v_half_block(pp).offsets
        for i in range(pp):
            low, high = i, 2 * pp - 1 - i
            assert offsets[Op.F, low] == 2 * i
            assert offsets[Op.F, high] == 3 * pp - 2 - i
            assert offsets[Op.B, high] == 3 * pp - 2 + g + 2 * i
            assert offsets[Op.B, low] == 6 * pp - 3 + g - i


def test_colliding_block_and_too_small_cap() -> None:
    with pytest.raises(ValueError, match="passes of rank 0 collide"):
        vee_block(4, down=2, up=1, f_turn=1, loss_turn=1, b_turn=2)
    block = v_zb_block(4)
    tasks = Tasks(block.placement, Durations.unit(block.placement), 8)
    with pytest.raises(ValueError, match="the base holds 8, more than the cap of 6"):
        list_schedule(tasks, tasks.rows(block.stamp(8)), [6] * 4)


def test_passes_of_very_different_length_take_no_time_to_order() -> None:
    """Looking whenever the shortest pass could have ended would take 2^64 looks."""
    for name in NAMES:
        schedule = generate(name, 3, 4, costs=Costs.of(1, 2**64, "0.5"))
        check(schedule)
        assert schedule.costs.backward_input == 2**64  # what is simulated stays as it was given
