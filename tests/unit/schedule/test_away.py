"""Orders made for offload: which sets leave, what then counts, and how tight the orders are."""

from __future__ import annotations

import pytest

from megatron_ext.schedule import Costs, Link, Placement, generate, simulate
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.generators.away import _leaving, _without, orders_for_offload
from megatron_ext.schedule.tasks import Tasks

COSTS = Costs.of(1, 2, 1, "0.25")


@pytest.mark.parametrize("copies", [0, 1, 6, 7, 12, 1000])
def test_sets_leave_that_have_time_for_both_copies(copies: int) -> None:
    """By the order's own times: from the end of F to the start of B."""
    base = generate("v-zb", 4, 6, costs=COSTS, effort=0)
    durations = COSTS.durations(base.placement)
    tasks = Tasks(base.placement, durations, 6)
    run = simulate(base)
    assert run.scale == durations.scale
    begin: dict[Action, int] = {}
    end: dict[Action, int] = {}
    for row, starts, ends in zip(run.schedule.ranks, run.start, run.end):
        for action, start, stop in zip(row, starts, ends):
            begin[action], end[action] = start, stop  # type: ignore[index]
    expected = {
        (stage, j)
        for stage in range(8)
        for j in range(6)
        if begin[Action(Op.B, stage, j)] - end[Action(Op.F, stage, j)] >= copies
    }
    found = _leaving(tasks, tasks.rows(base.ranks), [copies] * 8)  # type: ignore[arg-type]
    assert set(found) == expected
    assert len(expected) == {0: 48, 1000: 0}.get(copies, len(expected))


def test_a_set_that_leaves_counts_in_f_and_from_b_to_w() -> None:
    placement = Placement.loop(2)
    tasks = Tasks(placement, Durations.unit(placement), 2)
    away = _without(tasks, {(0, 1)})
    for unit, counts in ((0, [(1, 0), (0, 0), (0, 1)]), (1, [(1, 1), (1, 0), (0, 1)])):
        for op, (take, give) in zip((Op.F, Op.B, Op.W), counts):
            number = away.number(op, 0, unit)
            assert (away.take[number], away.give[number]) == (take, give)
    assert tasks.give[tasks.number(Op.F, 0, 1)] == 0


def test_both_ways_of_a_copy_count() -> None:
    base = generate("v-zb", 4, 8, effort=0)
    orders = [
        [one.ranks for one in orders_for_offload(base, Link.of(4, *times), 4, 0.1)]
        for times in (("0.2", "0.2"), ("0.1", "0.3"), ("0.3", "0.1"), ("2", "2"))
    ]
    assert orders[0] == orders[1] == orders[2] != orders[3]
    assert len(orders[0]) >= 2 and list(orders_for_offload(base, Link.of(4, "0.2"), 4, 0)) == []
