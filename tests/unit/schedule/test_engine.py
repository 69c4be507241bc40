"""The table of tasks and the engine over it: equal to the simulator, safe for any table."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import Costs, Op, Placement, check, engine, generate, simulate
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, earliest, list_schedule, one_by_one, replay
from megatron_ext.schedule.generators.blocks import VEES
from megatron_ext.schedule.generators.cap import LEAST_CAP, v_cap_limits
from megatron_ext.schedule.simulate import run_times
from megatron_ext.schedule.tasks import Tasks, UnitCosts
from tests.support.grids import sampled
from tests.support.tables import random_tasks

GAPS = (Fraction(0), Fraction(1, 3), Fraction(3, 4), Fraction(1), Fraction(3))


@pytest.mark.parametrize("name", ["zb-h1", "gis", "v-min", "v-half", "v-zb"])
@pytest.mark.parametrize("costs", [Costs(), Costs.of(1, "1.3", "0.8", "0.25")])
def test_a_replay_is_the_simulated_run(name: str, costs: Costs) -> None:
    """One is told when inputs come, the other looks for them."""
    for pp, m in ((2, 3), (4, 9), (5, 5)):
        schedule = generate(name, pp, m, costs=costs)
        durations = costs.durations(schedule.placement)
        tasks = Tasks(schedule.placement, durations, m)
        rows = tasks.rows(schedule.ranks)
        ends = replay(tasks, rows)
        assert ends is not None
        assert [[ends[task] for task in row] for row in rows] == run_times(schedule, durations)[1]
        assert tasks.peaks(rows) == simulate(schedule).peak_sets
        assert tasks.actions(rows) == [list(row) for row in schedule.ranks]


@pytest.mark.parametrize("name", VEES)
def test_a_stamped_block_becomes_the_named_order(name: str) -> None:
    """One list schedule, no search: as fast, and in no more memory."""
    for pp in (2, 3, 4, 5, 7, 8):
        for m in (1, pp, 2 * pp + 1):
            vee, placement = VEES[name], Placement.vee(pp)
            tasks = Tasks(placement, Durations.unit(placement), m)
            stamped = tasks.rows(vee.block(pp).stamp(m))
            ends = replay(tasks, list_schedule(tasks, stamped, [vee.cap(pp)] * pp))
            assert ends is not None
            assert max(ends) == 2 * simulate(generate(name, pp, m)).makespan


def test_slices_pass_keys_and_their_gradients_on() -> None:
    """By hand: two ranks, one microbatch of two slices, F 1 and 2, B 2 and 3, W 1, hop 1."""
    units = [UnitCosts(1, 2, 1, 1), UnitCosts(2, 3, 1, 2)]
    placement = Placement.loop(2, 1)
    tasks = Tasks(placement, Durations.unit(placement)._replace(hop=1), [units])
    rows = one_by_one(tasks)
    names = [[f"{op.value}{unit}" for op, _, unit in map(tasks.name, row)] for row in rows]
    assert [name for name in names[1] if name[0] != "W"] == ["F0", "F1", "B1", "B0"]
    ends = replay(
        tasks, [sorted(row, key=lambda task: tasks.name(task)[0].value == "W") for row in rows]
    )
    assert ends is not None
    found = {
        f"{op.value}{s}.{u}": ends[tasks.number(op, s, u)]
        for op, s, u in map(tasks.name, range(12))
    }
    # Rank 1 has F1 at 3 + 1 to 6; then B of the later slice first, and that of slice 0 after it.
    assert [found[x] for x in ("F0.0", "F0.1", "F1.0", "F1.1")] == [1, 3, 3, 6]
    assert [found[x] for x in ("B1.1", "B1.0", "B0.1", "B0.0")] == [9, 11, 13, 15]
    assert tasks.peaks(rows) == [3, 3]


def test_the_earliest_starts_wait_for_inputs_alone() -> None:
    """By hand: a V of two ranks, F 1 2 3 4, B 2, W 1, a hop 10, two microbatches."""
    placement = Placement.vee(2)
    durations = Durations((1, 2, 3, 4), (2,) * 4, (1,) * 4, hop=10, scale=1)
    tasks = Tasks(placement, durations, 2)
    starts = dict(zip(map(tasks.name, range(len(tasks.rank))), earliest(tasks)))
    for unit in range(2):
        assert [starts[Op.F, s, unit] for s in range(4)] == [0, 11, 13, 26]
        assert [starts[Op.B, s, unit] for s in range(4)] == [56, 44, 42, 30]
        assert [starts[Op.W, s, unit] for s in range(4)] == [58, 46, 44, 32]


def test_orders_that_wait_in_a_circle_have_no_end() -> None:
    placement = Placement.loop(2, 1)
    tasks = Tasks(placement, Durations.unit(placement), 1)
    rows = one_by_one(tasks)
    assert replay(tasks, [row[::-1] for row in rows]) is None


def test_a_base_that_does_not_fit_is_refused() -> None:
    placement = Placement.vee(2)
    tasks = Tasks(placement, Durations.unit(placement), 2)
    with pytest.raises(ValueError, match="rank 0: the base holds 2, more than the cap of 1"):
        list_schedule(tasks, one_by_one(tasks), [1, 2])


def shuffled(rng: random.Random, rows: Rows) -> Rows:
    return [rng.sample(row, len(row)) for row in rows]


@pytest.mark.parametrize("seed", sampled(range(170), (0,)))
def test_no_list_schedule_waits_for_ever_or_holds_more(seed: int) -> None:
    """Slices, sizes, hops, tight caps, any preferences and gaps, both directions of time: 60
    tables a seed."""
    rng = random.Random(seed)
    for _ in range(60):
        tasks = random_tasks(rng)
        base = one_by_one(tasks)
        caps = [peak + rng.choice((0, 0, rng.randint(0, 20))) for peak in tasks.peaks(base)]
        for _ in range(2):
            rows = list_schedule(
                tasks,
                base,
                caps,
                gap=rng.choice((rng.choice(GAPS), [rng.choice(GAPS) for _ in base])),
                order=rng.choice((None, shuffled(rng, base))),
                backward=rng.random() < 0.5,
            )
            assert sorted(task for row in rows for task in row) == list(range(len(tasks.rank)))
            assert all(peak <= cap for peak, cap in zip(tasks.peaks(rows), caps))
            assert replay(tasks, rows) is not None
            base = rows  # what it gives is a base again


@pytest.mark.parametrize("costs", [Costs(), Costs.of(1, "1.3", "0.8", "0.1")])
def test_caps_below_v_mins(costs: Costs) -> None:
    """Down to one microbatch's two sets; less memory is never faster."""
    for pp, m in ((4, 8), (5, 3), (8, 16)):
        caps = range(LEAST_CAP, v_cap_limits(pp)[0] + 1)
        made = [generate("v-cap", pp, m, memory_cap=cap, costs=costs) for cap in caps]
        for cap, schedule in zip(caps, made):
            check(schedule)
            assert max(simulate(schedule).peak_sets) <= cap
        times = [simulate(schedule).makespan for schedule in made]
        assert times == sorted(times, reverse=True)


def test_makespans_below_v_mins() -> None:
    """Pinned, in chunk units at equal costs; V-Min, with eight sets, takes 119."""
    times = {}
    for cap in (2, 3, 5, 6, 7):
        times[cap] = 2 * simulate(generate("v-cap", 8, 16, memory_cap=cap, effort=0.1)).makespan
    assert times == {2: 333, 3: 309, 5: 173, 6: 137, 7: 132}
    quick = generate("v-cap", 8, 16, memory_cap=6, effort=0)
    assert 2 * simulate(quick).makespan == 137


def test_a_rank_looks_again_when_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very unequal passes: to look again after each of the shortest takes minutes."""
    looks, choose = Counter[str](), engine._Rank.choose

    def counted(rank: Any, now: int, patient: bool) -> int | None:
        looks["at ranks"] += 1
        return choose(rank, now, patient)

    monkeypatch.setattr(engine._Rank, "choose", counted)
    rows = (1, 2, 1), (2**31, 2, 1), (1, 2, 1), (1, 2002, 10**9)
    costs = Costs(stages=tuple((Fraction(f), Fraction(b), Fraction(w)) for f, b, w in rows))
    start = generate("zb-h1", 4, 3)
    tasks = Tasks(start.placement, costs.durations(start.placement), 3)
    base = tasks.rows(start.ranks)
    list_schedule(tasks, base, tasks.peaks(base))
    # Once at the start, and when a pass ends: its own rank, and one that it feeds.
    assert looks["at ranks"] <= len(base) + 2 * len(tasks.rank)
