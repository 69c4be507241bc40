"""Simulator against cases worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    NAMES,
    Action,
    Costs,
    Placement,
    Schedule,
    ScheduleError,
    generate,
    lower,
    simulate,
)


def schedule(placement: Placement, microbatches: int, *ranks: str) -> Schedule:
    rows = tuple(tuple(Action.parse(text) for text in row.split()) for row in ranks)
    return Schedule("test", placement, microbatches, rows)


def test_two_ranks_one_microbatch_with_hop() -> None:
    s = schedule(Placement.loop(2), 1, "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0")
    run = simulate(s, Costs.of(2, 3, 1, "0.5"))
    # Rank 0: F 0-2; rank 1: F 2.5-4.5, B 4.5-7.5, W 7.5-8.5; rank 0: B 8-11, W 11-12.
    assert run.scale == 2
    assert run.start == [[0, 16, 22], [5, 9, 15]]
    assert run.end == [[4, 22, 24], [9, 15, 17]]
    assert run.makespan == 12
    assert run.bubble == Fraction(1, 2)
    assert run.span_bubble == Fraction(1, 2)
    assert run.memory_curve(0) == [(0, 1), (24, 0)]
    assert run.memory_curve(1) == [(0, 0), (5, 1), (17, 0)]


def test_1f1b_by_hand() -> None:
    run = simulate(generate("1f1b", 2, 2))
    # rank 0: F0 0-1, F1 1-2, BW0 4-6, BW1 7-9; rank 1: F0 1-2, BW0 2-4, F1 4-5, BW1 5-7.
    assert run.start == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert run.end == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert run.makespan == 9
    assert run.bubble == Fraction(1, 3)
    assert run.peak_sets == [2, 1]
    # Freed at 4 and allocated at 4 is one step.
    assert run.memory_curve(1) == [(0, 0), (1, 1), (4, 1), (7, 0)]


def test_v_turn_costs_no_hop() -> None:
    s = schedule(Placement.vee(2), 1, "F0.0 F3.0 BW3.0 BW0.0", "F1.0 F2.0 BW2.0 BW1.0")
    run = simulate(s, Costs.of(2, 2, 2, 10))
    # F0 0-1, F1 11-12, F2 12-13 on the same rank, F3 23-24, BW3 24-26, BW2 36-38,
    # BW1 38-40 on the same rank, BW0 50-52.
    assert run.start == [[0, 23, 24, 50], [11, 12, 36, 38]]
    assert run.makespan == 52
    assert run.peak_activation == [1, 1]


def test_costs_per_stage() -> None:
    costs = Costs.of(stages=[[1, 1, 1], [2, 3, 4]])
    run = simulate(generate("1f1b", 2, 1), costs)
    assert run.makespan == 1 + 2 + 7 + 2
    # Mean idle share: rank 0 works 3 of 12, rank 1 works 9 of 12.
    assert run.bubble == Fraction(1, 2)


def test_bubble_of_uniform_costs_is_the_definition() -> None:
    for name in NAMES:
        costs = Costs.of(1, "0.98", "0.74", "0.03")
        run = simulate(generate(name, 4, 10), costs)
        assert run.bubble == 1 - 10 * Fraction("2.72") / run.makespan
        assert 0 <= run.span_bubble <= run.bubble < 1


def test_scaling_all_costs_scales_time_and_nothing_else() -> None:
    for name in NAMES:
        s = generate(name, 4, 10)
        one = simulate(s, Costs.of(1, "0.98", "0.74", "0.03"))
        other = simulate(s, Costs.of("3.7", "3.626", "2.738", "0.111"))
        assert other.makespan == one.makespan * Fraction("3.7")
        assert (other.bubble, other.span_bubble) == (one.bubble, one.span_bubble)


def test_costs_default_to_those_of_the_schedule() -> None:
    costs = Costs.of(2, 2, 2)
    assert simulate(generate("1f1b", 2, 2, costs=costs)).makespan == 18
    assert simulate(generate("1f1b", 2, 2, costs=costs), Costs()).makespan == 9


def test_communication_is_ignored() -> None:
    s = generate("v-half", 4, 7)
    lowered = simulate(lower(s))
    assert lowered == simulate(s)
    assert lowered.schedule == s


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_agrees_with_the_peak(name: str) -> None:
    run = simulate(generate(name, 5, 11), Costs.of(1, "1.1", "0.8", "0.1"))
    for rank in range(5):
        curve = run.memory_curve(rank)
        times, sets = [t for t, _ in curve], [n for _, n in curve]
        assert times == sorted(set(times))
        assert max(sets) <= run.peak_sets[rank]
        assert (times[0], sets[-1]) == (0, 0)
        assert times[-1] == run.end[rank][-1]


def test_hop_is_charged_between_ranks_only_once_per_edge() -> None:
    base = simulate(generate("1f1b", 4, 1)).makespan
    assert simulate(generate("1f1b", 4, 1), Costs.of(hop=1)).makespan == base + 2 * 3


def test_orders_that_cannot_progress() -> None:
    s = schedule(Placement.loop(2), 2, "F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    with pytest.raises(ScheduleError) as error:
        simulate(s)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        "the order cannot progress: rank 0, position 1: BW0.0 waits for BW1.0 of rank 1; "
        "ranks 0, 1 wait for each other in a circle"
    )
    assert lines[1] == "rank 0 |   F0.0  [BW0.0]  F0.1   BW0.1  <-- BW0.0 waits for BW1.0 of rank 1"
    assert lines[2] == "rank 1 |   F1.0  [F1.1]   BW1.0  BW1.1  <-- F1.1 waits for F0.1 of rank 0"


def test_missing_and_repeated_passes() -> None:
    with pytest.raises(ScheduleError, match=r"B0\.0 waits for B1.0 of rank 1, which has finished"):
        simulate(schedule(Placement.loop(2), 1, "F0.0 B0.0 W0.0", "F1.0"))
    with pytest.raises(ScheduleError, match=r"W0\.0 waits for B0.0 of rank 0, which stands later"):
        simulate(schedule(Placement.loop(1), 1, "F0.0 W0.0 B0.0"))
    with pytest.raises(ScheduleError, match=r"rank 0: F0.0 repeats a pass.*\n.*\n.*\[F0.0\]"):
        simulate(schedule(Placement.loop(1), 1, "F0.0 F0.0"))


def test_empty_schedule() -> None:
    run = simulate(schedule(Placement.loop(2), 1, "", ""))
    assert run.makespan == run.bubble == 0
    assert run.peak_sets == [0, 0]
