"""Moves, annealing, walks and longer orders, over the table of tasks."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from megatron_ext.schedule import Costs, Schedule, check, generate, simulate
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, one_by_one, replay
from megatron_ext.schedule.generators.longer import cuts, lengthened, longer
from megatron_ext.schedule.moves import Order
from megatron_ext.schedule.search import FINE, Search
from megatron_ext.schedule.tasks import Tasks
from tests.support.tables import random_tasks

UNEQUAL = Costs.of(1, "1.3", "0.6", "0.05")


def table(start: Schedule, costs: Costs = UNEQUAL) -> tuple[Tasks, Rows]:
    """Its tasks and their order."""
    durations = costs.durations(start.placement)
    tasks = Tasks(start.placement, durations.times(FINE, FINE), start.microbatches)
    return tasks, tasks.rows(start.ranks)


def made(tasks: Tasks, rows: Rows) -> Schedule:
    """The schedule of an order, checked."""
    orders = tuple(map(tuple, tasks.actions(rows)))
    schedule = Schedule("made", tasks.placement, tasks.units, orders, UNEQUAL)
    check(schedule)
    return schedule


def span(tasks: Tasks, rows: Rows) -> int:
    ends = replay(tasks, rows)
    assert ends is not None
    return max(ends)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_times_change_with_moves(pp: int) -> None:
    rng = random.Random(pp)
    tasks, rows = table(generate("v-half", pp, 5))
    caps = [max(tasks.peaks(rows))] * pp
    order = Order(tasks, rows, caps)
    for _ in range(40):
        # Far worse orders now and then, so that the best one is a new one each time.
        order.best_time = 1 << 60
        while not order.move(rng.random, 400 * FINE) or order.best_time == 1 << 60:
            pass
        assert max(check(made(tasks, order.best)).peak_sets) <= caps[0]
        assert span(tasks, order.best) == order.best_time == order.time


def test_moves_of_any_table_keep_it_runnable_and_within_its_caps() -> None:
    """Slices, sizes, costs of every unit, hops."""
    rng, changed = random.Random(3), 0
    for _ in range(25):
        tasks = random_tasks(rng)
        search = Search(tasks, [10**9] * tasks.placement.pp)
        lanes = range(tasks.lane[-1] + 1)
        place = {task: k for lane in lanes for k, task in enumerate(tasks.lane_order(lane))}
        search.run([one_by_one(tasks)], 0)
        rows = search.pool[0].rows
        caps = tasks.peaks(rows)
        order = Order(tasks, rows, caps)
        for _ in range(300):
            changed += order.move(rng.random, 300)
            if not changed % 7:
                present = order.present
                assert span(tasks, present) == order.time
                assert all(map(int.__le__, tasks.peaks(present), caps))
                for row in present:
                    for lane in lanes:
                        places = [place[task] for task in row if tasks.lane[task] == lane]
                        assert places == sorted(places)
    assert changed > 500


def test_moves_that_cannot_run_end_at_once() -> None:
    """Passes that wait for each other a short time, and a limit that is 2^64 times as long."""
    tasks, rows = table(generate("v-half", 3, 4), Costs.of(1, 2**64, "0.5"))
    order = Order(tasks, rows, [6] * 3)
    rng = random.Random(1)
    for _ in range(2000):
        order.move(rng.random, FINE * 2**64)
    assert order.work < 2000 * 10


def test_searches_are_the_same_in_other_units() -> None:
    start = generate("v-min", 4, 6)
    durations = UNEQUAL.durations(start.placement)
    found = []
    for factor in (1, 3):
        times: Durations = durations.times(FINE * factor, 1)
        tasks = Tasks(start.placement, times, 6)
        search = Search(tasks, [5] * 4)
        search.run([tasks.rows(start.ranks)], 20_000)
        found.append(search.pool[0].rows)
    assert found[0] == found[1]
    assert span(tasks, found[0]) < span(tasks, tasks.rows(start.ranks))


def test_a_steady_state_is_repeated() -> None:
    start = generate("v-half", 4, 12)
    tasks, rows = table(start, Costs())
    more, best = table(generate("v-half", 4, 17), Costs())
    found = list(cuts(tasks, rows, replay(tasks, rows) or [], 1, 5))
    assert len(found) == 5
    longer_rows = [lengthened(tasks, rows, cut, 1, more, 5) for cut in found]
    assert all(max(check(made(more, rows)).peak_sets) == 6 for rows in longer_rows)
    times = [span(more, rows) for rows in longer_rows]
    assert times[2] == min(times) == span(more, best)


@pytest.mark.parametrize("m", [1, 2, 7])
def test_orders_without_a_steady_state_are_lengthened_too(m: int) -> None:
    tasks, rows = table(generate("v-cap", 3, m, costs=UNEQUAL, memory_cap=5))
    for period in (1, 2, 3):
        found = list(cuts(tasks, rows, replay(tasks, rows) or [], period, 40))
        assert found or m < 7
        more, _ = table(generate("v-min", 3, m + 2 * period))
        for cut in found:
            made(more, lengthened(tasks, rows, cut, period, more, 2 * period))


def test_longer_orders_keep_the_caps_the_likely_fastest_first() -> None:
    """Exactly so for up to p microbatches more."""
    tasks, rows = table(generate("v-half", 4, 8, costs=UNEQUAL))
    short = Search(tasks, [6] * 4)
    short.add(rows)
    for count in (1, 2, 6, 12):
        more, _ = table(generate("v-min", 4, 8 + count))
        times = []
        for found in longer(short, more, 1 << 20):
            assert max(more.peaks(found)) <= 6
            made(more, found)
            times.append(span(more, found))
        assert times and (times == sorted(times) or count > 4)
        assert times[0] <= Fraction(102, 100) * min(times)


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(8, 8, 32), (6, 4, 18), (12, 4, 36)])
def test_many_chunks_at_unequal_costs(pp: int, chunks: int, microbatches: int) -> None:
    """Small groups of many chunks wait for each other: they only say what comes first."""
    stages = [(30, 31, 18)] * (pp * chunks)
    stages[0], stages[-1] = (15, 17, 9), (22, 29, 9)
    costs = Costs.of(hop=1, stages=stages)
    made = generate("interleaved-zb", pp, microbatches, chunks, costs, effort=0.05)
    check(made)
    fixed = generate("interleaved-zb", pp, microbatches, chunks, costs, effort=0)
    assert simulate(made, costs).makespan <= simulate(fixed, costs).makespan
