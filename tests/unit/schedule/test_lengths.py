"""Microbatches of different lengths: costs, order, and what planning for them saves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from megatron_ext.schedule import Costs, Placement, Schedule, ScheduleSpec, select
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, replay
from megatron_ext.schedule.generators.lengths import arranged, arrangements
from megatron_ext.schedule.generators.sliced import planned
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.search import FINE
from megatron_ext.schedule.tasks import Tasks
from megatron_ext.schedule.units import SHARE, slice_costs

A = Fraction(3, 10)
PP, MEAN = 8, 4096  # ranks; tokens


def table(lengths: Sequence[int], slice_length: int | None) -> Tasks:
    """All passes of microbatches of these lengths in tokens, without hops."""
    placement = Placement.vee(PP)
    units = [
        slice_costs(
            1 if slice_length is None else -(-length // slice_length),
            A,
            length=Fraction(length, MEAN),
        )
        for length in lengths
    ]
    return Tasks(placement, Durations.unit(placement).times(FINE, 1), units)


def mean_order() -> Schedule:
    """``v-cap`` at 1F1B's memory for 16 microbatches that are all as long as the mean."""
    costs = Costs.of("1", str(1 + float(A)), str(1 - float(A)), "0")
    return select(ScheduleSpec("v-cap", PP, 16, costs=costs, cap=ShareCap(Fraction(1)))).schedule


def idle(tasks: Tasks, rows: Rows) -> float:
    """Per cent of the makespan."""
    ends = replay(tasks, rows)
    assert ends is not None
    return 100 * (1 - sum(tasks.duration) / PP / max(ends))


def test_costs_grow_with_length() -> None:
    """Twice as long: F (1 - a)2 + 4a, B (1 - a)2 + 8a, W and sets by length alone."""
    half, two = (slice_costs(1, A, length=x)[0] for x in (Fraction(1, 2), 2))
    assert two[:4] == tuple(round(x * SHARE) for x in (1.4 + 1.2, 1.4 + 2.4, 1.4, 2))
    assert half[:4] == tuple(round(x * SHARE) for x in (0.35 + 0.075, 0.35 + 0.15, 0.35, 0.5))


@pytest.mark.parametrize("attention", [Fraction(0), A, Fraction(1)])
def test_slices_add_up(attention: Fraction) -> None:
    """As many as the length asks for, equally long F's, the costs of the whole together."""
    for tokens, count in ((1, 1), (99, 1), (101, 2), (437, 5)):
        length = Fraction(tokens, 200)
        (one,) = slice_costs(1, attention, length=length)
        units = slice_costs(count, attention, length=length)
        forward = [unit.forward for unit in units]
        assert max(forward) - min(forward) <= 2
        for k, cost in enumerate(one[:4]):
            assert abs(sum(unit[k] for unit in units) - cost) <= len(units)


def test_arranged_is_a_permutation_with_short_ends() -> None:
    rng = random.Random(5)
    for count in range(1, 40):
        lengths = [rng.randint(1, 9) for _ in range(count)]
        order = arranged(lengths)
        assert sorted(order) == list(range(count))
        these = [lengths[k] for k in order]
        top = these.index(max(these))
        assert these[: top + 1] == sorted(these[: top + 1])
        assert these[top:] == sorted(these[top:], reverse=True)
    assert arranged([7] * 5) == arranged([8] * 5)
    assert arrangements([3, 1, 2]) == [[0, 1, 2], [1, 0, 2], [1, 2, 0]]


def test_planning_saves_idle_time() -> None:
    """At one memory: for the mean, list schedules in the given order, arranged, and slices; each
    runs, keeps to the cap, is the same again, and idles less than the one before."""
    rng = random.Random(11)
    lengths = [rng.randint(2000, 6000) for _ in range(16)]
    tasks = table(lengths, None)
    known = tasks.rows(mean_order().ranks)
    caps = [max(tasks.peaks(known))] * len(known)
    found = [idle(tasks, known)]
    hill = [lengths[k] for k in arranged(lengths)]
    for these, slice_length in ((lengths, None), (hill, None), (hill, 1024)):
        tasks = table(these, slice_length)
        rows = planned(tasks, caps, 0)
        assert rows == planned(table(these, slice_length), caps, 0)
        assert replay(tasks, rows) and max(tasks.peaks(rows)) <= caps[0]
        assert sorted(task for row in rows for task in row) == list(range(len(tasks.rank)))
        found.append(idle(tasks, rows))
    assert found == sorted(found, reverse=True)
    assert found[2] < found[0] - 5 and found[3] < 4


def test_a_search_finds_no_slower_order() -> None:
    tasks = table([3000, 5000, 4000, 4500, 3500, 4000, 6000, 2000] * 2, None)
    caps = [sum(tasks.take) // 8] * 8
    times = [max(replay(tasks, planned(tasks, caps, work)) or [0]) for work in (0, 20_000)]
    assert 0 < times[1] < times[0]


def test_a_cap_below_one_microbatch() -> None:
    with pytest.raises(ValueError, match="more than the cap of 1"):
        planned(table([4000] * 8, None), [1] * 8, 0)
