"""Generators: published closed forms, memory caps, and validity for every size."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
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
from megatron_ext.schedule.generators.blocks import squeeze, vee_block
from megatron_ext.schedule.generators.vee import v_half_block, v_zb_block

SIZES = [*range(2, 17), 32]


def half_cap(pp: int) -> int:
    return 2 * ((pp + 2) // 2)


def microbatch_counts(pp: int) -> list[int]:
    return [2 * pp, 2 * pp + 1, 3 * pp - 1, 5 * pp] if pp < 12 else [2 * pp, 3 * pp - 1]


@pytest.mark.parametrize("pp", SIZES)
def test_1f1b(pp: int) -> None:
    for m in (1, pp - 1, pp, *microbatch_counts(pp)):
        run = simulate(generate("1f1b", pp, m))
        assert run.makespan == 3 * (m + pp - 1)
        assert run.peak_activation == [min(m, pp - rank) for rank in range(pp)]


@pytest.mark.parametrize("pp", SIZES)
def test_zb_h1(pp: int) -> None:
    for m in (pp, pp + 1, *microbatch_counts(pp)):
        run = simulate(generate("zb-h1", pp, m))
        assert run.makespan == 3 * m + pp - 1
        assert run.peak_activation == [pp] * pp


@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved(pp: int, chunks: int) -> None:
    for m in (pp, 2 * pp, 3 * pp):
        run = simulate(generate("interleaved", pp, m, chunks))
        assert run.makespan == 3 * m + Fraction(3 * (pp - 1), chunks)
        if m > pp:
            assert max(run.peak_activation) == pp * (1 + Fraction(pp - 1, pp * chunks))


@pytest.mark.parametrize("pp", SIZES)
def test_v_zb(pp: int) -> None:
    for m in (pp, pp + 1, *microbatch_counts(pp)):
        run = simulate(generate("v-zb", pp, m))
        assert run.makespan == Fraction(6 * m + pp - 1, 2)
        assert max(run.peak_sets) == 2 * pp
        if m >= 2 * pp:
            assert run.span_bubble == 0


@pytest.mark.parametrize("pp", SIZES)
def test_v_half(pp: int) -> None:
    k = half_cap(pp)
    for m in (pp, pp + 1, *microbatch_counts(pp)):
        run = simulate(generate("v-half", pp, m))
        # At p=2 the cap is 1F1B's memory; the first term would be less than the work of a rank.
        assert run.makespan == Fraction(max(6 * m + 6 * pp - 3 * k - 1, 6 * m + pp - 1), 2)
        assert run.makespan <= Fraction(6 * m + 6 * pp - 3 * k - 1, 2) or pp == 2
        assert max(run.peak_sets) == k


@pytest.mark.parametrize("pp", range(17, 32))
def test_v_schedules_at_every_size(pp: int) -> None:
    m, k = 2 * pp, half_cap(pp)
    half, zero = simulate(generate("v-half", pp, m)), simulate(generate("v-zb", pp, m))
    assert half.makespan == Fraction(6 * m + 6 * pp - 3 * k - 1, 2)
    assert zero.makespan == Fraction(6 * m + pp - 1, 2)
    assert (max(half.peak_sets), max(zero.peak_sets)) == (k, 2 * pp)


def test_v_half_with_few_microbatches_meets_the_bound_once_memory_binds() -> None:
    for pp in (3, 4, 5, 6, 7, 8, 11, 16):
        k = half_cap(pp)
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
@pytest.mark.parametrize("pp", range(2, 7))
def test_valid_for_every_microbatch_count(name: str, pp: int) -> None:
    for m in range(1, 3 * pp + 2):
        for chunks in (2, 3) if name == "interleaved" else (None,):
            schedule = generate(name, pp, m, chunks)
            report = check(schedule)
            cap = {"v-half": half_cap(pp), "v-zb": 2 * pp, "1f1b": pp, "zb-h1": pp}.get(
                name, schedule.chunks * pp + pp - 1
            )
            assert max(report.peak_sets) <= cap
            assert report.peak_sets == simulate(schedule).peak_sets
            assert check(lower(schedule)) == report


@pytest.mark.parametrize("name", NAMES)
def test_valid_at_larger_sizes(name: str) -> None:
    for pp, m in ((13, 5), (16, 33), (32, 9)):
        schedule = generate(name, pp, m)
        assert check(lower(schedule, Costs.of(1, "0.98", "0.74", "0.1"))) == check(schedule)


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


def test_orders_do_not_depend_on_costs_and_are_deterministic() -> None:
    for name in NAMES:
        one = generate(name, 4, 9)
        other = generate(name, 4, 9, costs=Costs.of(3, 7, "0.5", 1))
        assert one.ranks == other.ranks
        assert other.costs == Costs.of(3, 7, "0.5", 1)
        assert one.fingerprint() == generate(name, 4, 9).fingerprint()


def test_registry() -> None:
    assert NAMES == ("1f1b", "interleaved", "zb-h1", "v-half", "v-zb")
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
        (("nope", 4, 8), "unknown schedule 'nope'; known: 1f1b, interleaved, zb-h1, v-half, v-zb"),
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


def test_costs_for_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="costs are given for 3 stages but pp=2 x chunks=2 has 4"):
        generate("v-half", 2, 4, costs=Costs.of(stages=[[1, 1, 1]] * 3))


@pytest.mark.parametrize("name", NAMES)
def test_large_schedules_are_generated_fast(name: str) -> None:
    begin = time.process_time()
    generate(name, 32, 256)
    assert time.process_time() - begin < 3  # measured: 0.3 s for the V schedules, less for others


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


@pytest.mark.parametrize("pp", range(2, 33))
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
    with pytest.raises(ValueError, match="keeps 8 activation sets, more than the cap of 6"):
        squeeze(block.stamp(8), block.placement, cap=6)
