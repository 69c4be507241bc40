"""Lower bounds: never above a schedule, nor above the exact optimum of what is small enough."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from megatron_ext.schedule import NAMES, Costs, Placement, generate, simulate
from megatron_ext.schedule.bounds import lower_bound, makespan_bound
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from megatron_ext.schedule.vocabulary import Vocabulary
from tests.support.grids import sampled

Op = tuple[str, int]  # F, B or W, and its stage


def shortest(
    placement: Placement, m: int, times: dict[Op, int], hop: int, cap: int, fused: bool
) -> int:
    """The exact makespan of the best order: every state that can be reached, unit by unit.

    A state is how many passes of each kind have started, and what runs or is on its way, as
    (pass, time to its end, less than 0 once it has ended). Microbatches are alike, so they run in
    order of their numbers.
    """
    n, free = placement.num_stages, "B" if fused else "W"
    rows = [[op for op in times if op[1] in row] for row in placement.stages]

    def inputs(op: Op) -> list[Op]:
        kind, s = op
        if kind == "F":
            return [("F", s - 1)] if s else []
        own = [("F" if kind == "B" else "B", s)]
        return own + ([("B", s + 1)] if kind == "B" and s + 1 < n else [])

    numbers = {op: i for i, op in enumerate(times)}
    needs = {
        op: [(numbers[x], hop * (placement.rank_of(x[1]) != rank)) for x in inputs(op)]
        for rank, row in enumerate(rows)
        for op in row
    }

    def starts(
        rank: int, started: tuple[int, ...], flying: frozenset[tuple[int, int]]
    ) -> list[int]:
        """Passes that a rank can start now."""
        mine = {numbers[op] for op in rows[rank]}
        if any(i in mine and left > 0 for i, left in flying):
            return []

        def ended(i: int, ago: int) -> int:
            return started[i] - sum(1 for k, left in flying if k == i and left > -ago)

        held = sum(started[numbers[op]] for op in rows[rank] if op[0] == "F")
        held -= sum(ended(numbers[op], 0) for op in rows[rank] if op[0] == free)
        return [
            numbers[op]
            for op in rows[rank]
            if started[numbers[op]] < m
            and (op[0] != "F" or held < cap)
            and all(ended(i, ago) > started[numbers[op]] for i, ago in needs[op])
        ]

    durations = list(times.values())
    goal = (m,) * len(durations)
    states = {((0,) * len(durations), frozenset[tuple[int, int]]())}
    time = 0
    while True:
        following = set()
        for started, flying in states:
            if started == goal and all(left <= 0 for _, left in flying):
                return time
            choices = [[None, *starts(rank, started, flying)] for rank in range(placement.pp)]
            for chosen in product(*choices):
                count, now = list(started), set(flying)
                for i in chosen:
                    if i is not None:
                        count[i] += 1
                        now.add((i, durations[i]))
                later = frozenset((i, left - 1) for i, left in now if left > -hop)
                following.add((tuple(count), later))
        states, time = following, time + 1
        assert states and time < 200


UNIT = (1, 1, 1, 0)
CASES = [
    # placement, m, costs of a stage and hop, caps
    (Placement.loop(2), 3, UNIT, (1, 2, 3, 6)),
    (Placement.loop(2), 3, (2, 1, 1, 1), (1, 2, 3)),
    (Placement.loop(2), 3, (1, 2, 1, 0), (1, 2)),
    (Placement.loop(3), 2, (1, 1, 2, 1), (1, 2)),
    (Placement.loop(3), 3, UNIT, (2, 3)),
    (Placement.vee(2), 1, (2, 1, 1, 1), (2,)),
    (Placement.vee(2), 2, UNIT, (2, 3, 4)),
    (Placement.vee(2), 2, (1, 2, 1, 1), (2, 3, 4)),
    (Placement.vee(2), 3, UNIT, (3, 4)),
    (Placement.loop(2, 2), 2, UNIT, (2, 3, 4)),
]


@pytest.mark.parametrize(
    ("case", "fused"),
    sampled(
        product(range(len(CASES)), (False, True)),
        [*product((0, 6), (False, True)), *((k, False) for k in (2, 3, 5)), (1, True), (9, True)],
    ),
)
def test_bound_and_optimum(case: int, fused: bool) -> None:
    """Never above the optimum of any order, and at most two units below it where it is tiny."""
    placement, m, (f, b, w, hop), caps = CASES[case]
    rng = random.Random(case)
    for cap in caps:
        for uneven in (False, True):
            rows = [[f, b, w] for _ in range(placement.num_stages)]
            if uneven:
                rows[rng.randrange(len(rows))][rng.randrange(3)] += 1
            times: dict[Op, int] = {}
            for s, (forward, backward, weight) in enumerate(rows):
                times["F", s] = forward
                times["B", s] = backward + weight if fused else backward
                if not fused:
                    times["W", s] = weight
            costs = Costs.of(hop=hop, stages=rows)
            bound = lower_bound(placement, m, costs, cap, fused=fused).value
            assert bound <= shortest(placement, m, times, hop, cap, fused) <= bound + 2


COSTS = [
    lambda n: Costs(),
    lambda n: Costs.parse("1,0.98,0.74,0.05"),
    lambda n: Costs.parse("3,1,0.2"),
    lambda n: Costs.parse("1,2,4,1"),
    lambda n: Costs.of(hop="0.3", stages=[[1 + 3 * (s == n - 1), 1, 1] for s in range(n)]),
    lambda n: Costs.of(stages=[[1 + s % 3, 2, 1 + s % 2] for s in range(n)]),
]


@pytest.mark.parametrize("name", NAMES)
def test_no_named_schedule_is_below_its_bound(name: str) -> None:
    """A fixed order under many costs, at its own peak."""
    for pp, factor in product((2, 3, 6), (0, 1, 2)):
        m = factor * pp + 1
        schedule = generate(name, pp, m)
        n = schedule.placement.num_stages
        for costs in (make(n) for make in COSTS):
            run = simulate(schedule, costs)
            sets, fused = max(run.peak_sets), not schedule.splits_backward
            bound = lower_bound(schedule.placement, m, costs, sets, fused=fused).value
            split = lower_bound(schedule.placement, m, costs, sets).value
            wide = lower_bound(schedule.placement, m, costs, fused=fused).value
            assert run.makespan >= bound >= max(split, wide)


def test_equal_costs_in_v_placement() -> None:
    """CM's closed form (figure 13) and the last rank's, wherever memory binds."""
    for pp in (2, 3, 4, 5, 7, 8, 12, 16):
        for m in (1, 2, pp, 2 * pp, 3 * pp + 1):
            for cap in range(2, min(2 * pp, 2 * m - 1) + 1):
                bound = 2 * lower_bound(Placement.vee(pp), m, Costs(), cap).value
                least = 6 * m + max(6 * pp - 3 * cap - 1, 3 * pp - 1 - cap)
                assert bound >= least
                if cap >= 2 * ((pp + 4) // 3) and m >= 2 * pp:
                    assert bound == least


def test_kinds() -> None:
    loop, vee = Placement.loop(4), Placement.vee(8)
    real = Costs.parse("1,0.98,0.74")
    for placement, m, costs, cap, fused, kind in (
        (loop, 8, Costs(), 4, False, "work"),
        (loop, 8, Costs(), 4, True, "way"),
        (vee, 16, real, 12, False, "memory"),
        (loop, 8, Costs(), 1, False, "lifespan"),
    ):
        assert lower_bound(placement, m, costs, cap, fused=fused).kind == kind
    assert lower_bound(vee, 16, real, 12).value == Fraction("50.34")
    scaled = Costs.parse("1000,980,740")
    assert makespan_bound(vee, 16, scaled, 12) == 50340


def test_bounds_are_met_where_an_order_is_optimal() -> None:
    """Closed forms: 1F1B's way out and back, ZB-H1 and V-ZB at equal costs without hops."""
    for pp in (2, 3, 5, 8):
        loop, vee = Placement.loop(pp), Placement.vee(pp)
        for m in (2 * pp, 3 * pp + 1):
            assert makespan_bound(loop, m, Costs()) == 3 * m + pp - 1
            assert 2 * makespan_bound(vee, m, Costs(), 2 * pp) == 6 * m + pp - 1
        assert makespan_bound(loop, 1, Costs.of(2, 3, 1, "0.5")) == 5 * pp + 1 + pp - 1


def test_heavy_last_stage_waits_for_its_first_f() -> None:
    """Rank 0 runs k - 1 F's, 2 each, until the first microbatch is there, at 30."""
    heavy = Costs.of(stages=[(2, 2, 2)] * 15 + [(3, 3, 3)])
    for cap in (11, 12, 14, 16):
        bound = lower_bound(Placement.vee(8), 16, heavy, cap)
        assert bound.value == 16 * 15 + 30 - 2 * (cap - 1)
        run = simulate(generate("v-cap", 8, 16, costs=heavy, memory_cap=cap))
        assert run.makespan == bound.value


def test_bound_with_little_memory() -> None:
    """One set: a rank does one microbatch at a time, from its F through the loss to its W."""
    costs = Costs.of(2, 3, 1, "0.5")
    for pp in (2, 4):
        stays = 5 * pp + 1 + pp - 1
        assert makespan_bound(Placement.loop(pp), 6, costs, 1) == 6 * stays


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dualpipev"])
def test_vocabulary_passes(name: str) -> None:
    """Random costs, even vocabulary passes far longer than stages: no order is below its bound."""
    numbers = random.Random(name)

    def times(*choices: int | str) -> list[int | str]:
        return [numbers.choice(choices) for _ in range(3)]

    for pp, m in ((2, 1), (2, 5), (3, 7), (4, 4)):
        n = generate(name, pp, m).placement.num_stages
        costs = Costs.of(
            hop=numbers.choice(("0", "0.5")),
            stages=[times(1, 2, 4) for _ in range(n)],
            vocabulary=[*times("0.1", 1, 3), "0.1", numbers.choice(("0", "0.3", "2"))],
        )
        base = generate(name, pp, m, costs=costs, effort=0.02)
        fused = not base.splits_backward
        schedule = add_vocabulary(base)
        run, vocabulary = simulate(schedule), schedule.vocabulary
        bounds = [
            lower_bound(base.placement, m, costs, cap, fused=fused, vocabulary=some).value
            for some in (vocabulary, None)
            for cap in (max(run.peak_sets), None)
        ]
        assert run.makespan >= bounds[0] >= bounds[1] >= bounds[3]
        assert bounds[0] >= bounds[2] >= bounds[3]


def test_way_of_one_microbatch_with_vocabulary_passes() -> None:
    """E and its collective, the stages, the barriers, back, and G: nothing runs beside them."""
    costs = Costs.of(2, 3, 1, "0.5", vocabulary=["0.25", "0.125", "0.5", "4", "0.1"])
    for name, pp in product(("1f1b", "zb-h1"), (2, 5)):
        base = generate(name, pp, 1, costs=costs)
        schedule, fused = add_vocabulary(base), not base.splits_backward
        bound = lower_bound(base.placement, 1, costs, fused=fused, vocabulary=schedule.vocabulary)
        way = Fraction("5.15") + 5 * pp + pp - 1 + fused * pp
        assert bound == (way, "way")
        # ZB-H1 puts the first rank's W before its G.
        assert simulate(schedule).makespan == way + (0 if fused else Fraction("0.9"))


def test_bound_of_memory_with_vocabulary_passes() -> None:
    """With one set a rank's microbatches follow each other, each with its barrier."""
    costs = Costs.of(2, 3, 1, "0.5", vocabulary=["0.25", "0.125", "0.5", "0.5", "0.1"])
    placement = Placement.loop(4)
    bound = lower_bound(placement, 6, costs, 1, vocabulary=Vocabulary(placement))
    assert bound.kind == "lifespan"
    assert bound.value == Fraction("0.6") + 6 * (5 * 4 + 1 + 3 + Fraction("0.45"))
