"""Optimizer post-validation in lowered schedules: where it stands, that it cannot deadlock, and how
long an iteration takes with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    Link,
    Schedule,
    ScheduleError,
    ScheduleSpec,
    check,
    generate,
    lower,
    offload_pass,
    select,
    simulate,
)
from megatron_ext.schedule.actions import Action, AnyAction, Op
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import NAMES
from megatron_ext.schedule.io import from_json
from megatron_ext.schedule.post_validation import (
    ValidationOp,
    add_post_validation,
    describe_gain,
    head_length,
    steady_time,
)
from tests.support.grids import sampled


def made(name: str, pp: int = 4, microbatches: int = 8, **options: object) -> Schedule:
    if name == "v-cap":
        options.setdefault("memory_cap", 2 * pp)
    return generate(name, pp, microbatches, **options)  # type: ignore[arg-type]


def without_validation(row: Iterable[AnyAction]) -> tuple[AnyAction, ...]:
    return tuple(a for a in row if not any(isinstance(x.op, ValidationOp) for x in a.parts))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", sampled([2, 3, 6]))
def test_every_schedule_has_it_and_cannot_deadlock(name: str, pp: int) -> None:
    for microbatches in (1, pp, 2 * pp + 1):
        try:
            schedule = made(name, pp, microbatches, costs=Costs.parse("10,12,8,1"))
        except ValueError:
            continue  # a number of microbatches that this schedule has not got
        lowered = add_post_validation(lower(schedule))
        check(lowered)
        assert lowered.unlowered().ranks == schedule.ranks
        assert [without_validation(row) for row in lowered.ranks] == list(lower(schedule).ranks)
        for rank, row in enumerate(lowered.ranks):
            head = row[: head_length(row)]
            passes = [a for a in head if a.is_compute]
            assert all(a[:2] == (Op.F, schedule.placement.stages[rank][0]) for a in passes)
            assert rank > 0 or passes


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-zb", "interleaved-zb"])
def test_the_pipeline_is_filled_meanwhile(name: str) -> None:
    for row in add_post_validation(lower(made(name))).ranks:
        rank = row[0].stage
        passes = [str(a) for a in row[: head_length(row)] if a.is_compute]
        assert passes == [f"F{rank}.{j}" for j in range(4 - rank)]


def test_order_of_each_rank() -> None:
    rows = [" ".join(map(str, r)) for r in add_post_validation(lower(made("1f1b", 3, 2))).ranks]
    assert rows[0].startswith(
        "PREFIX0.0 SEND_PREFIX0.0 STEP0.0 F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_STATE0.0 VALIDATE0.0 "
    )
    assert rows[1].startswith("RECV_PREFIX1.0 PREFIX1.0 SEND_PREFIX1.0 STEP1.0 RECV_F1.0")
    assert " RECV_STATE1.0 VALIDATE1.0 SEND_STATE1.0 " in rows[1]
    assert rows[2].startswith("RECV_PREFIX2.0 PREFIX2.0 STEP2.0 RECV_F2.0")
    assert " F2.0 VALIDATE2.0 SEND_STATE2.0 BW2.0" in rows[2]


def moved(schedule: Schedule, action: str, rank: int, to: int) -> Schedule:
    """``action`` of a rank, moved to another position."""
    rows = [list(row) for row in schedule.ranks]
    rows[rank].remove(Action.parse(action))
    rows[rank].insert(to, Action.parse(action))
    return schedule.with_ranks(rows)


class TestFaults:
    lowered = add_post_validation(lower(made("v-zb", 3, 4)))

    @pytest.mark.parametrize(
        ("action", "rank", "to", "message"),
        [
            ("STEP1.0", 1, 0, "post-validation is STEP1.0 RECV_PREFIX1.0"),
            ("SEND_PREFIX0.0", 0, 6, "its first 3 at the begin"),
            ("VALIDATE0.0", 0, 3, "VALIDATE0.0 RECV_STATE0.0, but a rank's is"),
            ("RECV_STATE0.0", 0, 4, "RECV_STATE0.0 VALIDATE0.0 must stand together"),
        ],
    )
    def test_wrong_place(self, action: str, rank: int, to: int, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            check(moved(self.lowered, action, rank, to))

    def test_missing_on_one_rank(self) -> None:
        rows = [list(row) for row in self.lowered.ranks]
        rows[2] = list(without_validation(rows[2]))
        with pytest.raises(ScheduleError, match=r"rank 2.*post-validation is none, but"):
            check(self.lowered.with_ranks(rows))

    def test_a_pass_that_must_not_run_in_doubt(self) -> None:
        row = self.lowered.ranks[2]
        end = head_length(row)
        rows = [list(r) for r in self.lowered.ranks]
        # Both VALIDATE and its message behind the pass that follows them.
        rows[2] = [*row[: end - 2], row[end], *row[end - 2 : end], *row[end + 1 :]]
        assert rows[2][end - 2] == Action.parse("F3.0")
        with pytest.raises(ScheduleError, match=r"F3.0 stands before VALIDATE2.0; only forward"):
            check(self.lowered.with_ranks(rows))

    def test_a_message_under_way(self) -> None:
        row = self.lowered.ranks[0]
        rows = [list(r) for r in self.lowered.ranks]
        end = head_length(row)
        send = end - 3
        assert row[send].op is Op.SEND_F
        rows[0] = [*row[:send], *row[send + 1 : end], row[send], *row[end:]]
        with pytest.raises(ScheduleError, match="stand on two sides of VALIDATE"):
            check(self.lowered.with_ranks(rows))

    def test_an_order_that_deadlocks(self) -> None:
        """The rank before hands its statistics on only after it has validated them."""
        row = self.lowered.ranks[0]
        rows = [list(r) for r in self.lowered.ranks]
        rows[0] = [a for a in row if a.op is not ValidationOp.SEND_PREFIX]
        with pytest.raises(ScheduleError):
            check(self.lowered.with_ranks(rows))


class TestTime:
    @pytest.mark.parametrize(
        ("pp", "m", "gain"), [(8, 16, 0.0680), (8, 32, 0.0352), (4, 8, 0.0588)]
    )
    def test_v_zb_loses_its_parallelogram(self, pp: int, m: int, gain: float) -> None:
        """ZB, section 4: what is left is the longest rank's span, here its work."""
        lowered = add_post_validation(lower(made("v-zb", pp, m, objective="span")))
        assert steady_time(lowered) == 3 * m
        assert float(1 - steady_time(lowered) / simulate(lowered).makespan) == pytest.approx(
            gain, abs=5e-5
        )
        assert f"takes {gain:.1%} less" in describe_gain(lowered)

    @pytest.mark.parametrize("name", NAMES)
    def test_never_shorter_than_the_longest_span(self, name: str) -> None:
        lowered = add_post_validation(lower(made(name, objective="span")))
        run = simulate(lowered)
        span = max(end[-1] - start[0] for start, end in zip(run.start, run.end))
        assert Fraction(span, run.scale) <= steady_time(lowered) <= run.makespan

    def test_nothing_to_gain_is_said(self) -> None:
        assert "gains 1f1b nothing" in describe_gain(add_post_validation(lower(made("1f1b"))))

    def test_hops_count(self) -> None:
        lowered = add_post_validation(lower(made("v-zb", objective="span")))
        slow = replace(lowered, costs=replace(lowered.costs, hop=Fraction(1, 10)))
        assert steady_time(slow) > steady_time(lowered)

    def test_copies_and_streams_delay_both(self) -> None:
        """1F1B gains nothing, however slow its copies and messages are."""
        slow = offload_pass(made("1f1b"), Link.of(4, 1), "half").schedule
        lowered = add_post_validation(lower(slow))
        run = simulate(lowered)
        assert run.transfers is not None and run.transfers.stall > 0
        assert steady_time(lowered) == run.makespan
        assert "gains 1f1b nothing" in describe_gain(lowered)

    def test_needs_post_validation(self) -> None:
        with pytest.raises(ValueError, match="lowered without post-validation"):
            steady_time(lower(made("v-zb")))


@pytest.mark.parametrize("name", ["1f1b", "v-zb"])
def test_steady_time_of_slices_and_unequal_microbatches(name: str) -> None:
    """No less than a rank's work, no more than one iteration by itself; 1F1B gains nothing."""
    plain = add_post_validation(lower(generate(name, 4, 8)))
    rows = [[1, 1, 1, 1]] * 8
    equal = replace(plain, costs=Costs().with_units(rows))
    assert steady_time(equal) == steady_time(plain)
    heavy = Costs().with_units([[3, 2, 1, 1], *rows[1:]])
    sliced = add_post_validation(lower(generate(name, 4, 8, slices=3)))
    check(sliced)
    for schedule, work in ((replace(plain, costs=heavy), 27), (sliced, 24)):
        alone = simulate(schedule).makespan
        assert work <= steady_time(schedule) <= alone
        assert (steady_time(schedule) == alone) == (name == "1f1b")


def test_a_file_holds_it_as_it_is() -> None:
    lowered = add_post_validation(lower(made("v-half")))
    again = from_json(lowered.to_json())
    assert again.ranks == lowered.ranks
    check(again)


def test_a_sharded_vocabulary_is_refused() -> None:
    """By whatever makes, checks or times it: no crash, and no schedule that training refuses."""
    costs = Costs.of(vocabulary=(0.25, 0.25, 0.1, 0.1))
    sharded = lower(select(ScheduleSpec("v-half", 4, 8, costs=costs, barriers=1)).schedule)
    prefixes = (Action(ValidationOp.PREFIX, rank, 0) for rank in range(4))
    with_prefix = sharded.with_ranks([[p, *row] for p, row in zip(prefixes, sharded.ranks)])
    for function, schedule in (
        (add_post_validation, sharded),
        (check, with_prefix),
        (steady_time, with_prefix),
    ):
        with pytest.raises(ScheduleError, match="v-half has a sharded vocabulary"):
            function(schedule)
