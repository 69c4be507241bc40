"""Slices of a sequence, and costs of single microbatches: orders, memory, files, checks, costs."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_ext.schedule import (
    NAMES,
    Costs,
    Link,
    Placement,
    Schedule,
    ScheduleError,
    check,
    generate,
    load,
    lower,
    offload_pass,
    save,
    simulate,
)
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import replay
from megatron_ext.schedule.generators.blocks import VEES, named_block
from megatron_ext.schedule.io import from_json
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.select import ScheduleSpec, select
from megatron_ext.schedule.tasks import Tasks
from megatron_ext.schedule.units import SHARE, UnitCosts, shares_of, slice_costs, units_of

P = 8
SLICED = [name for name in NAMES if name != "dualpipev"]


def idle_and_memory(schedule: Schedule) -> tuple[float, float]:
    """Shares of the makespan, and of p microbatches; the order is valid, lowered too."""
    check(lower(schedule))
    run = simulate(schedule)
    return float(run.bubble), float(max(run.peak_activation)) / schedule.pp


# (name, m, K): most idle time, memory. 1F1B of whole microbatches idles 46.7 % at m=8.
EQUAL = [
    ("v-zb", 8, 4, 0.036, 0.344),
    ("v-zb", 4, 4, 0.0681, 0.344),
    ("v-zb", 8, 8, 0.018, 0.235),
    ("v-zb", 2, 4, 0.2132, 0.25),
    ("v-zb", 1, 8, 0.3044, 0.125),
    ("v-half", 8, 4, 0.065, 0.25),
    ("v-min", 8, 4, 0.084, 0.219),
    ("1f1b", 8, 4, 0.1795, 0.344),
    ("gis-h", 8, 4, 0.0681, 0.297),
]


@pytest.mark.parametrize(("name", "m", "slices", "idle", "memory"), EQUAL)
def test_idle_time_at_equal_costs(
    name: str, m: int, slices: int, idle: float, memory: float
) -> None:
    found = idle_and_memory(generate(name, P, m, slices=slices, effort=0))
    assert found[0] <= idle and found[1] <= memory


def causal(attention: Fraction, m: int, slices: int) -> Costs:
    """A layer's at this share of attention, cut into slices."""
    costs = Costs.of(1, 1 + attention, 1 - attention)
    return costs.with_units(shares_of((slices,) * m, attention))


@pytest.mark.parametrize(
    ("attention", "idle", "memory"),
    [("0.1", 0.044, 0.35), ("0.3", 0.054, 0.362), ("0.6", 0.072, 0.38)],
)
def test_balanced_cuts_of_causal_attention(attention: str, idle: float, memory: float) -> None:
    costs = causal(Fraction(attention), 8, 4)
    found = idle_and_memory(generate("v-zb", P, 8, costs=costs, slices=4))
    assert found[0] <= idle and found[1] <= memory


def test_a_hop_of_a_hundredth() -> None:
    schedule = generate("v-zb", P, 8, costs=Costs.of(hop=Fraction(1, 100)), slices=4)
    assert idle_and_memory(schedule)[0] <= 0.051
    lower(schedule)


def test_any_memory_from_one_microbatch_on() -> None:
    """In V-Half's, as fast as its name or faster; below V-Min's one microbatch after the other is
    where the search starts. A cap need not be whole sets."""
    half = generate("v-half", P, 8, slices=4, effort=0)
    times = {}
    for cap in (Fraction(2), Fraction(13, 4), Fraction(4), Fraction(11, 2)):
        capped = generate("v-cap", P, 8, slices=4, effort=0, memory_cap=cap)
        assert max(check(capped).peak_activation) <= cap / 2
        times[cap] = simulate(capped).makespan
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert times[Fraction(4)] <= simulate(half).makespan
    with pytest.raises(ValueError, match="takes a memory cap from 2"):
        generate("v-cap", P, 8, slices=4, memory_cap=Fraction(7, 4))
    with pytest.raises(ValueError, match="takes whole sets, got a memory cap of 5.5"):
        generate("v-cap", P, 8, memory_cap=Fraction(11, 2))


@pytest.mark.parametrize("name", SLICED)
def test_every_name_at_any_slices_and_costs(name: str) -> None:
    """Slices and costs of each microbatch differ; files say the same, and times scale."""
    rng = random.Random(name)
    for _ in range(3):
        pp, m = rng.randint(2, 5), rng.randint(1, 6)
        counts = [rng.randint(1, 4) for _ in range(m)]
        factors = [tuple(Fraction(rng.randint(1, 6), 2) for _ in range(3)) for _ in range(m)]
        shares = shares_of(counts, Fraction(rng.randint(0, 9), 10), factors)
        costs = Costs.of(1, 2, 1, Fraction(1, 10)).with_units(shares)
        schedule = generate(name, pp, m, costs=costs, slices=counts, effort=0)
        assert sum(counts) == len(schedule.units)
        idle_and_memory(schedule)
        assert from_json(schedule.to_json()) == schedule
        twice = replace(costs, **{f: 2 * getattr(costs, f) for f in FIELDS})
        again = generate(name, pp, m, costs=twice, slices=counts, effort=0)
        assert again.ranks == schedule.ranks
        assert simulate(again).makespan == 2 * simulate(schedule).makespan
        # Every F, B and W once: the work is that of the factors.
        work = sum(f + 2 * b + w for f, b, w in factors) * pp
        run = simulate(schedule)
        assert run.makespan * pp * (1 - run.bubble) == work


FIELDS = ("forward", "backward_input", "backward_weight", "hop")


def test_costs_of_single_microbatches_without_slices() -> None:
    """A long microbatch counts in time and memory; equal factors change neither."""
    factors = [(Fraction(x),) * 3 for x in (1, 3, 1, 1)]
    costs = Costs().with_units(shares_of((1,) * 4, Fraction(0), factors))
    schedule = generate("v-zb", 4, 4, costs=costs, effort=0)
    assert not schedule.slices and schedule.has_units
    run = simulate(schedule)
    assert run.makespan >= 3 * 6 and max(run.peak_activation) == 6
    same = Costs().with_units(shares_of((1,) * 4, Fraction(0), [(Fraction(1),) * 3] * 4))
    equal = generate("v-zb", 4, 4, costs=same, effort=0)
    assert simulate(equal).makespan <= simulate(generate("v-zb", 4, 4, effort=0)).makespan
    with pytest.raises(ValueError, match="costs are given for 4 units, but 5 microbatches have 5"):
        generate("v-zb", 4, 5, costs=costs)


class TestJoined:
    """One W for all slices of a microbatch."""

    def test_fewer_passes_and_more_memory(self) -> None:
        """The same work; W's overhead is paid once; a microbatch's sets stay until its W."""
        for name in ("v-zb", "v-half", "zb-h1", "gis-h"):
            each = generate(name, P, 8, slices=4, effort=0)
            one = generate(name, P, 8, slices=4, effort=0, joined=True)
            idle_and_memory(one)
            ws = [sum(a.op is Op.W for row in x.ranks for a in row) for x in (each, one)]
            assert ws[0] == 4 * ws[1]
            runs = [simulate(x) for x in (each, one)]
            work = [x.makespan * (1 - x.bubble) for x in runs]
            assert work[0] == work[1]
            assert max(runs[0].peak_activation) <= max(runs[1].peak_activation) <= 5
            assert max(runs[1].peak_sets) == max(check(one).peak_sets)
            assert runs[1].memory_curve(0)[-1][1] == 0

    def test_overhead_is_paid_once(self) -> None:
        shares = shares_of((8,) * 4, Fraction(0), None, Fraction(1, 5))
        dear = generate("v-zb", P, 4, costs=Costs().with_units(shares), slices=8, effort=0)
        one = generate("v-zb", P, 4, slices=8, effort=0, joined=True)
        assert simulate(one).makespan < simulate(dear).makespan

    def test_in_files_and_checks(self, tmp_path: Path) -> None:
        one = generate("v-half", 2, 2, slices=[3, 1], effort=0, joined=True)
        save(one, tmp_path / "x.json")
        assert load(tmp_path / "x.json") == one
        data = one.to_json()
        assert data["joined"] and "W0.0/0" in data["ranks"][0] and "W0.0/1" not in data["ranks"][0]
        data["ranks"][0].append("W0.0/1")
        with pytest.raises(ScheduleError, match="W0.0/1 repeats the W of all slices"):
            check(from_json(data))
        data["ranks"][0] = [a for a in data["ranks"][0] if a not in ("W0.0/0", "W0.0/1")]
        with pytest.raises(ScheduleError, match="W0.0/0 is missing"):
            check(from_json(data))
        with pytest.raises(ScheduleError, match='"joined" must be true or false'):
            from_json(data | {"joined": 2})
        with pytest.raises(ScheduleError, match='"microbatch_order" must have every number'):
            from_json(data | {"microbatch_order": [0, 0]})
        for name, slices in (("1f1b", 2), ("v-zb", 1)):
            with pytest.raises(ValueError, match="no W passes of their own|for microbatches that"):
                generate(name, 2, 2, slices=slices, joined=True)


def test_stamped_blocks_run_at_any_number_of_slices() -> None:
    """K of each microbatch differs; of V blocks and those of one chunk the memory is the block's
    and the slices' before the last; grouped blocks run too."""
    rng = random.Random(2)
    for _ in range(60):
        pp = rng.randint(2, 7)
        name = rng.choice([*VEES, "zb-h1", "zb-h2", "1f1b", "interleaved", "gis-h", "po"])
        block = named_block(name, pp)
        counts = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
        units = [[UnitCosts(*(rng.randint(1, 9) for _ in range(3)))] * count for count in counts]
        durations = Durations.unit(block.placement)._replace(hop=rng.randint(0, 3))
        fused = {s for op, s in block.offsets if op.value == "BW"}
        tasks = Tasks(block.placement, durations, units, fused=fused)
        rows = block.rows(tasks)
        assert replay(tasks, rows) is not None
        chunks = block.placement.chunks
        if block.group == 1:
            assert max(tasks.peaks(rows)) <= block.peak() + chunks * (max(counts) - 1)


def test_costs_of_cuts_add_up() -> None:
    for attention in (Fraction(0), Fraction(3, 10), Fraction(1)):
        for slices in (1, 3, 4, 8):
            units = slice_costs(slices, attention)
            forward, backward, weight, size = (sum(row) for row in zip(*(u[:4] for u in units)))
            assert abs(forward - SHARE) <= slices and abs(size - SHARE) <= slices
            assert abs(backward - (1 + attention) * SHARE) <= slices
            assert abs(weight - (1 - attention) * SHARE) <= slices
            assert max(u.forward for u in units) - min(u.forward for u in units) <= 2
            assert [u.size for u in units] == sorted((u.size for u in units), reverse=True)


class TestText:
    def test_a_unit_prints_as_its_slice(self, tmp_path: Path) -> None:
        """Only where a microbatch has several; a file keeps it, and numbers travel."""
        schedule = generate("v-half", 4, 3, slices=[1, 2, 4], effort=0)
        assert [str(a) for a in schedule.ranks[0][:4]] == ["F0.0", "F0.1/0", "F0.1/1", "F0.2/0"]
        assert "SEND_F0.2/3" in map(str, lower(schedule).ranks[0])
        path = tmp_path / "sliced.json"
        save(schedule, path)
        assert '"slices": [1, 2, 4]' in path.read_text()
        back = load(path)
        assert back == schedule and str(back.ranks[0][2]) == "F0.1/1"
        assert pickle.loads(pickle.dumps(units_of([1, 2]))) == (0, 1, 2)
        assert list(map(str, pickle.loads(pickle.dumps(units_of([1, 2]))))) == ["0", "1/0", "1/1"]
        assert generate("v-zb", 2, 2, slices=3, effort=0).to_json()["slices"] == 3
        assert "slices" not in generate("v-zb", 2, 2, effort=0).to_json()
        assert schedule.fingerprint() != generate("v-half", 4, 7, effort=0).fingerprint()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"slices": None}, "names a slice, but the microbatches are not cut"),
            ({"slices": [2, 3]}, "'F0.0/2' names unit 0/2, but units go from 0/0 to 1/2"),
            ({"slices": [3]}, "slices are given for 1 microbatches, but there are 2"),
            ({"slices": 0}, '"slices" must be a whole number from 1'),
            ({"slices": "3"}, '"slices" must be a whole number'),
            ({"slices": [3, 10**6]}, "are more than 65536"),
        ],
    )
    def test_a_file_that_contradicts_itself(self, change: dict[str, object], words: str) -> None:
        data = generate("1f1b", 2, 2, slices=3, effort=0).to_json() | change
        data = {key: value for key, value in data.items() if value is not None}
        with pytest.raises(ScheduleError, match=words):
            from_json(data)

    def test_shares_are_exact_in_a_file(self) -> None:
        costs = Costs().with_units([[Fraction(1, 3), 1, "0.1", 2]])
        assert Costs.from_json(costs.to_json()) == costs
        for rows in ([[1, 1, 1]], [[1, 1, 1, 0]], "x"):
            with pytest.raises(ValueError, match=r"four shares|must be > 0|list of rows"):
                Costs.from_json({"units": rows})


class TestChecks:
    """Orders that would wait for ever are refused, and the first reason is named."""

    @staticmethod
    def changed(rank: int, *order: str) -> Schedule:
        """1F1B of one microbatch in two slices on two ranks, with another order on one rank."""
        schedule = generate("1f1b", 2, 1, slices=2, effort=0)
        data = schedule.to_json()
        data["ranks"][rank] = list(order)
        return from_json(data)

    def test_as_it_is(self) -> None:
        found = generate("1f1b", 2, 1, slices=2, effort=0)
        assert [str(a) for a in found.ranks[1]] == ["F1.0/0", "F1.0/1", "BW1.0/1", "BW1.0/0"]
        assert check(found).peak_activation == [1, 1]

    def test_the_first_slice_goes_back_first(self) -> None:
        rows = ("F1.0/0", "F1.0/1", "BW1.0/0", "BW1.0/1")
        with pytest.raises(ScheduleError, match="BW1.0/1 comes after BW1.0/0.*the last slice of"):
            check(self.changed(1, *rows))

    def test_the_last_slice_goes_forward_first(self) -> None:
        rows = ("F1.0/1", "F1.0/0", "BW1.0/1", "BW1.0/0")
        with pytest.raises(ScheduleError, match="F1.0/0 comes after F1.0/1.*slices in order"):
            check(self.changed(1, *rows))

    def test_a_slice_goes_back_before_the_next_is_there(self) -> None:
        rows = ("F0.0/0", "BW0.0/1", "F0.0/1", "BW0.0/0")
        with pytest.raises(ScheduleError, match="BW0.0/1 waits for F0.0/1 of rank 0, which stands"):
            check(self.changed(0, *rows))

    def test_a_circle_is_named(self) -> None:
        """Rank 0 ends microbatch 0 first, rank 1 wants a slice of the next before."""
        data = generate("1f1b", 2, 2, slices=2, effort=0).to_json()
        data["ranks"] = [
            [f"{op}{r}.{u}" for op, u in (part.split() for part in row.split(", "))]
            for r, row in enumerate(
                (
                    "F 0/0, F 0/1, BW 0/1, BW 0/0, F 1/0, F 1/1, BW 1/1, BW 1/0",
                    "F 0/0, F 0/1, F 1/0, BW 0/1, BW 0/0, F 1/1, BW 1/1, BW 1/0",
                )
            )
        ]
        words = "BW0.0/1 waits for BW1.0/1 of rank 1; ranks 0, 1 wait for each other in a circle"
        with pytest.raises(ScheduleError, match=words):
            check(from_json(data))

    def test_every_deadlock_of_random_orders_is_refused(self) -> None:
        """Two passes of a rank exchanged: refused, or run without waiting for ever by the rules
        that slices add."""
        rng = random.Random(4)
        refused = 0
        for _ in range(300):
            counts = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
            schedule = generate(
                rng.choice(["v-zb", "zb-h1"]), 3, len(counts), slices=counts, effort=0
            )
            rows = [list(row) for row in schedule.ranks]
            row = rows[rng.randrange(3)]
            i, j = rng.sample(range(len(row)), 2)
            row[i], row[j] = row[j], row[i]
            tasks = Tasks(
                schedule.placement,
                Durations.unit(schedule.placement),
                [[UnitCosts()] * count for count in counts],
            )
            runs = replay(tasks, tasks.rows(rows)) is not None
            try:
                check(schedule.with_ranks(rows))
            except ScheduleError as error:
                refused += 1
                assert "rank" in str(error)
            else:
                assert runs
        assert refused > 100


@pytest.mark.parametrize("name", ["1f1b", "v-half", "zb-h1"])
@pytest.mark.parametrize("attention", [0, Fraction(1, 2)])
def test_sets_of_slices_are_offloaded(name: str, attention: Fraction) -> None:
    """Each travels for its share of a set's time, and no pass waits; memory is their sum."""
    p, m, count = 4, 5, 3
    costs = Costs(units=shares_of((count,) * m, Fraction(attention)))
    schedule = generate(name, p, m, slices=count, costs=costs, effort=0)
    assert schedule.has_units
    before = simulate(schedule)
    plan = offload_pass(schedule, Link.of(p, "0.1"), "auto")
    check(lower(plan.schedule))
    run = simulate(plan.schedule)
    assert run.makespan == before.makespan and plan.stall == 0 and sum(map(sum, plan.moved)) > 40
    assert sum(run.peak_activation) < sum(before.peak_activation)
    assert run.transfers is not None and max(run.peak_host_activation) > 0
    sizes, whole = schedule.unit_costs()
    durations = Costs().durations(schedule.placement)
    for row in run.transfers.copies:
        for copy in row:
            unit = copy.action.microbatch
            assert str(copy.action).endswith(f"{unit.microbatch}/{unit.slice}")  # type: ignore[attr-defined]
            share = Fraction(sizes[unit].size, whole)
            chunk = sum(part[copy.action.stage] for part in durations[:3])
            expected = share * Fraction(chunk, durations.scale) / 10
            assert Fraction(copy.end - copy.start, run.scale) == expected
    # What moves of a part of the sets are the first slices, which live longest.
    half = offload_pass(schedule, Link.of(p, "0.1"), Fraction(1, 3))
    moved = [a for row in half.schedule.ranks for a in row if a.op is Op.OFFLOAD]
    assert {action.microbatch.slice for action in moved} == {0}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["v-cap", "auto"])
def test_a_cap_below_the_largest_sets(name: str) -> None:
    """Kept in bytes; cut microbatches idle less under it than whole ones do."""
    cap = ShareCap(Fraction(1, 2), growth=Fraction(5, 4))
    spec = ScheduleSpec(name, 4, 4, 2, cap=cap, effort=0, names=("v-half", "v-cap", "zb-h1"))
    whole, cut = select(spec), select(replace(spec, slices=(4,) * 4))
    for found in (whole, cut):
        assert cap.fits(found.schedule) and cap.needed(found.schedule) <= 2
    assert simulate(cut.schedule).bubble < simulate(whole.schedule).bubble / 2
    tight = replace(cap, share=Fraction(1, 4))
    assert not tight.fits(cut.schedule)


def test_a_set_on_its_way_frees_its_share() -> None:
    """By hand: two slices of 2/3 and 1/3; both are away at once, then the second comes back."""
    costs = Costs(units=(*[(Fraction(k, 3),) * 4 for k in (2, 1)],))
    row = """F0.0/0 OFFLOAD0.0/0 F0.0/1 OFFLOAD0.0/1 RELEASE0.0/0 RELEASE0.0/1 PREPARE0.0/1
    RELOAD0.0/1 BW0.0/1 PREPARE0.0/0 RELOAD0.0/0 BW0.0/0"""
    units = {str(unit): unit for unit in units_of([2])}
    actions = tuple(Action.parse(text, units) for text in row.split())
    one, link = Placement.loop(1), Link.of(1, "0.1")
    schedule = Schedule("file", one, 1, (actions,), costs, link=link, slices=(2,))
    assert schedule.peak_activation() == [1] and schedule.peak_host_activation() == [1]
    assert simulate(schedule).peak_host_activation == [1]
    run = simulate(schedule)
    shown = [(Fraction(time, run.scale), memory) for time, memory in run.memory_curve(0)]
    # F's until 2/3 and 1, while a copy of 0.2 leaves; another of 0.1; then 0.1 back, BW of 2/3,
    # 0.2 back, BW of 4/3.
    third = Fraction(1, 3)
    expected = [(0, 2 * third), (2 * third, 1), (1, third), (Fraction("1.1"), third)]
    assert shown == [*expected, (28 * third / 5, 2 * third), (Fraction("3.4"), 0)]


def test_what_takes_whole_microbatches_says_so() -> None:
    with pytest.raises(ValueError, match="dualpipev runs passes in pairs"):
        generate("dualpipev", 2, 2, slices=2)
