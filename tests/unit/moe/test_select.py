"""The choice of a layout, against trying all, and against the paper's rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from megatron_ext.moe.costs import (
    DIRECTIONS,
    Kind,
    LayerCosts,
    LayerShape,
    Line,
    Times,
    chunk_times,
)
from megatron_ext.moe.layout import ALTERNATE, DISPATCH_FIRST, Layout, Ring
from megatron_ext.moe.memory import Footprint, Load, footprint
from megatron_ext.moe.select import CHUNKS, SIMPLEST_FIRST, BudgetError, Choice, Space, choose
from megatron_ext.moe.simulate import simulate
from tests.support.grids import sampled
from tests.unit.moe.papers import choose_strategy

SHAPE = LayerShape(64, 96, "gelu", top_k=2)


def smooth(rng: random.Random) -> LayerCosts:
    def line() -> Line:
        return Line(10 ** rng.uniform(-3, -1), rng.choice([0, 2 * rng.random()]), rng.random())

    rows = [Line(10 ** rng.uniform(-1, 1), rng.random(), rng.random()) for _ in range(2)]
    return LayerCosts(line(), line(), *rows, line(), line())


def wave_quantised(rng: random.Random) -> LayerCosts:
    """GEMMs that run in whole waves of rows."""

    def waves(wave_rows: int) -> Callable[[float], float]:
        wave_ms, alpha_ms = 10 ** rng.uniform(0, 2), rng.random()
        return lambda rows: alpha_ms + wave_ms * math.ceil(rows / wave_rows)

    costs = smooth(rng)
    gemms = [waves(rng.choice([16, 33, 64])) for _ in "12"]
    return LayerCosts(
        costs.dispatch, costs.combine, *gemms, costs.to_host, costs.to_device,
        fc1_backward=waves(50),
    )  # fmt: skip


def jagged(rng: random.Random) -> LayerCosts:
    """Nothing about these is monotone."""
    phases = [rng.uniform(0.1, 3) for _ in range(6)]

    def cost(phase: float) -> Callable[[float], float]:
        return lambda volume: 2 + math.sin(phase * volume)

    return LayerCosts(*map(cost, phases))


def all_layouts() -> Iterator[Layout]:
    """With many that are the same."""
    for n, strategy, middle in product((1, 2, 4, 8), SIMPLEST_FIRST, (1, 2)):
        for ahead, depth in product((2, 3), (2, 3)):
            yield Layout(n, strategy, ALTERNATE, ahead, Ring(depth, middle, depth), packed=True)
        yield Layout(n, strategy, DISPATCH_FIRST, ring=Ring(None, middle, None), packed=True)


def time_of(costs: LayerCosts, rows: int, layout: Layout) -> float:
    times = chunk_times(SHAPE, costs, rows, layout.chunks)
    return sum(simulate(layout, direction, times).makespan_ms for direction in DIRECTIONS)


def assert_optimal(choice: Choice, costs: LayerCosts, load: Load, budget: int | None) -> None:
    least, simplest = math.inf, (0, 0)
    for one in all_layouts():
        if budget is not None and footprint(SHAPE, load, one).peak_bytes > budget:
            continue
        time = time_of(costs, load.rows, one)
        rank = (one.chunks, SIMPLEST_FIRST.index(one.strategy))
        if time < least * (1 - 1e-9):
            least, simplest = time, rank
        elif time <= least * (1 + 1e-9):
            simplest = min(simplest, rank)
    assert choice.time_ms == pytest.approx(least, rel=2e-9)
    assert (choice.layout.chunks, SIMPLEST_FIRST.index(choice.layout.strategy)) == simplest
    assert choice.time_ms == time_of(costs, load.rows, choice.layout)


@pytest.mark.parametrize("loads", sampled((2, 5), (2,)))
@pytest.mark.parametrize("make", [smooth, wave_quantised, jagged])
def test_the_choice_is_the_best_of_all(
    make: Callable[[random.Random], LayerCosts], loads: int
) -> None:
    rng = random.Random(make.__name__)
    for _ in range(loads):
        costs, load = make(rng), Load(rng.randint(1, 400), rng.randint(1, 4), rng.randint(1, 3))
        peaks = [footprint(SHAPE, load, one).peak_bytes for one in all_layouts()]
        for budget in (None, min(peaks), rng.randint(min(peaks), max(peaks))):
            choice = choose(SHAPE, load, costs, budget)
            assert budget is None or choice.footprint.peak_bytes <= budget
            assert_optimal(choice, costs, load, budget)
            assert choose(SHAPE, load, costs, budget) == choice


def test_never_slower_than_the_layer_as_it_is() -> None:
    rng = random.Random(7)
    for _ in range(30):
        costs, load = smooth(rng), Load(rng.randint(1, 1000))
        assert choose(SHAPE, load, costs).time_ms <= time_of(costs, load.rows, Layout())


def test_latency_alone_leaves_the_layer_as_it_is() -> None:
    costs = LayerCosts(*[Line(0.0, 1.0)] * 6)
    choice = choose(SHAPE, Load(1000), costs)
    assert (choice.layout.chunks, choice.layout.strategy, choice.time_ms) == (1, "none", 10.0)


def test_of_equals_the_simpler_one() -> None:
    """Nothing takes any time."""
    costs = LayerCosts(*[Line(0.0)] * 6)
    none = choose(SHAPE, Load(1000), costs)
    assert (none.layout.chunks, none.layout.strategy) == (1, "none")
    fixed = choose(SHAPE, Load(1000), costs, space=Space.of(4))
    assert (fixed.layout.chunks, fixed.layout.strategy) == (4, "none")
    assert (fixed.layout.order, fixed.layout.lookahead) == (ALTERNATE, 2)
    reuse = choose(SHAPE, Load(1000), costs, space=Space(strategies=("s1", "s4", "s2")))
    assert (reuse.layout.chunks, reuse.layout.strategy) == (1, "s4")
    small = footprint(SHAPE, Load(1000), Layout(8, "s4")).peak_bytes
    assert choose(SHAPE, Load(1000), costs, small).layout == Layout(8, "s4", packed=True)


@pytest.mark.parametrize("chunks", ["auto", "1", 2, "8"])
@pytest.mark.parametrize("strategy", ["auto", "none", "s2"])
def test_what_is_fixed_stays(chunks: str | int, strategy: str) -> None:
    rng = random.Random(8)
    for _ in range(5):
        choice = choose(SHAPE, Load(300), smooth(rng), space=Space.of(chunks, strategy))
        assert chunks == "auto" or choice.layout.chunks == int(chunks)
        assert strategy in ("auto", choice.layout.strategy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Space.of("many"), "many"),
        (lambda: Space.of(0), "0"),
        (lambda: Space.of("4", "s7"), "s7"),
        (lambda: Space(orders=("random",)), "random"),
        (lambda: Space(depths=()), "depths"),
    ],
)
def test_spaces_that_are_none(wrong: Callable[[], Space], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_lookahead_beyond_the_slots_is_cut() -> None:
    costs = LayerCosts(*[Line(0.01)] * 2, *[Line(1.0)] * 2, *[Line(0.01)] * 2)
    space = Space(orders=(ALTERNATE,), lookaheads=(5,), depths=(1,), strategies=("s4",))
    assert choose(SHAPE, Load(100), costs, space=space).layout.lookahead <= 2


def peak_of(one: Layout, load: Load) -> Footprint:
    return footprint(SHAPE, load, one)


def test_a_budget_that_nothing_keeps() -> None:
    load, costs = Load(1000, 4, 2), smooth(random.Random(10))
    least = min(peak_of(one, load).peak_bytes for one in all_layouts())
    with pytest.raises(BudgetError, match="least is") as error:
        choose(SHAPE, load, costs, least - 1)
    assert error.value.needed_bytes == least
    assert str(least) in str(error.value) and "8 chunks" in str(error.value)
    assert "most of it are the buffers" in str(error.value)
    assert choose(SHAPE, load, costs, least).footprint.peak_bytes == least


def test_a_fixed_part_that_does_not_fit() -> None:
    load, costs = Load(1000, 4, 2), smooth(random.Random(11))
    needed = min(peak_of(one, load).peak_bytes for one in all_layouts() if one.strategy == "none")
    with pytest.raises(BudgetError, match="most of it is kept for backward") as error:
        choose(SHAPE, load, costs, needed // 2, Space.of("auto", "none"))
    assert error.value.needed_bytes == needed


def test_the_default_space_has_no_two_that_are_the_same() -> None:
    """1 chunk once per strategy; slots beyond the chunks and lookaheads beyond them count once."""
    count = {s: len(list(Space().layouts(s))) for s in SIMPLEST_FIRST}
    assert count["none"] == 1 + 1 + 3 + 3
    assert count["s1"] == 1 + 2 + 2 * (2 * 2 + 1) * 2
    assert all(n in CHUNKS for n in {one.chunks for one in Space().layouts("s1")})


def units(gemm: float, exchange: float, copy: float) -> Times:
    comm = (Kind.DISPATCH, Kind.COMBINE, Kind.GRAD_DISPATCH, Kind.GRAD_COMBINE, Kind.REDISPATCH)
    comp = (Kind.FC1, Kind.FC2, Kind.REPEAT_FC1)
    return {
        **dict.fromkeys(comm, exchange),
        **dict.fromkeys(comp, gemm),
        Kind.FC1_BACKWARD: 2 * gemm,
        Kind.FC2_BACKWARD: 2 * gemm,
        Kind.SAVE_INPUT: copy,
        Kind.LOAD_INPUT: copy,
        Kind.SAVE_MIDDLE: 4 * copy,
        Kind.LOAD_MIDDLE: 4 * copy,
    }


RULE = [(4, 1, 0.42, 0.28, 0.4), (4, 2, 0.32, 0.18, 0.2), (8, 1, 0.42, 0.28, 0.4)]


@pytest.mark.parametrize(
    ("chunks", "middle", "most_wrong", "least_wrong", "worst"), sampled(RULE, RULE[:2])
)
def test_how_often_the_slowest_stream_is_the_wrong_rule(
    chunks: int, middle: int, most_wrong: float, least_wrong: float, worst: float
) -> None:
    """Equation 10 against simulated time: in the paper's rings, and with two slots for T_M.

    400 points: an all-to-all takes 0.1 to 3 of a GEMM, a copy 0.05 to 1.
    """
    rng, regrets = random.Random(13), []
    for _ in range(400):
        point = 1.0, rng.uniform(0.1, 3), rng.uniform(0.05, 1)
        times, ring = [units(*point)] * chunks, Ring(2, middle, 2)
        took = {
            strategy: sum(
                simulate(Layout(chunks, strategy, ring=ring), d, times).makespan_ms
                for d in DIRECTIONS
            )
            for strategy in ("s1", "s2", "s3", "s4")
        }
        regrets.append(took[choose_strategy(*point)] / min(took.values()) - 1)
    regrets.sort()
    wrong = sum(regret > 1e-9 for regret in regrets) / len(regrets)
    mean, p95 = sum(regrets) / len(regrets), regrets[int(0.95 * len(regrets))]
    print(
        f"n = {chunks}, {middle} slots for T_M: wrong {wrong:.1%}, "
        f"regret: mean {mean:.1%}, p95 {p95:.1%}, max {regrets[-1]:.1%}"
    )
    assert least_wrong < wrong < most_wrong
    assert 0 < mean < 0.05
    assert worst / 2 < regrets[-1] < worst
