"""Orders under every cap, on random requests; seeded, so every run tries the same ones."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    AUTO,
    Costs,
    check,
    generate,
    simulate,
)
from megatron_ext.schedule.bounds import makespan_bound
from megatron_ext.schedule.generators.cap import v_cap_limits
from tests.support.grids import sampled
from tests.support.schedules import made


def random_costs(rng: random.Random, stages: int) -> Costs:
    """Equal, mild, extreme, or per stage; with or without a hop."""
    hop = rng.choice(["0", "0", "0.05", "0.3", "1"])
    kind = rng.randrange(4)
    if kind == 0:
        return Costs.of(1, 1, 1, hop)
    low, high = ((8, 13), (2, 40))[kind == 2]
    if kind < 3:
        return Costs.of(*(Fraction(rng.randint(low, high), 10) for _ in "FBW"), hop)
    rows = [[Fraction(rng.randint(4, 16), 10) for _ in "FBW"] for _ in range(stages)]
    return Costs.of(1, 1, 1, hop, rows)


@pytest.mark.parametrize("seed", sampled(range(9), (0, 2)))
def test_v_cap_at_every_cap(seed: int) -> None:
    """Never slower with more memory, nor than a published order that fits."""
    rng = random.Random(f"caps {seed}")
    pp = rng.randint(2, 6)
    m = rng.randint(1, 3 * pp)
    costs = random_costs(rng, 2 * pp) if seed % 3 else Costs()
    published = [generate(name, pp, m) for name in ("v-min", "v-half", "v-zb")]
    low, high = v_cap_limits(pp)
    before = None
    for cap in range(low, high + 1):
        schedule = generate("v-cap", pp, m, costs=costs, memory_cap=cap)
        assert max(check(schedule).peak_sets) <= cap
        time = simulate(schedule).makespan
        assert before is None or time <= before
        before = time
        for fixed in published:
            if max(simulate(fixed).peak_sets) <= cap:
                assert time <= simulate(fixed, costs).makespan
        assert simulate(schedule).makespan >= makespan_bound(schedule.placement, m, costs, cap)


@pytest.mark.parametrize("seed", sampled(range(4), (2,)))
def test_auto_fits_its_cap(seed: int) -> None:
    rng = random.Random(f"auto {seed}")
    pp, m = rng.randint(2, 4), rng.randint(2, 10)
    costs, before = random_costs(rng, 2 * pp), None
    for cap in range(v_cap_limits(pp)[0], 2 * pp + 2):
        schedule = made(AUTO, pp, m, costs=costs, memory_cap=cap)
        run = simulate(schedule)
        assert check(schedule).peak_sets == run.peak_sets
        assert max(run.peak_activation) <= Fraction(cap, 2)
        assert before is None or run.makespan <= before
        before = run.makespan
