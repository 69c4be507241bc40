"""Orders of slices: idle time and memory, safety at any number of slices, costs of cuts."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from megatron_ext.schedule import Placement
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, replay
from megatron_ext.schedule.generators.blocks import VEES, named_block
from megatron_ext.schedule.generators.sliced import (
    SHARE,
    capped_rows,
    named_rows,
    slice_costs,
    stamped,
)
from megatron_ext.schedule.search import FINE
from megatron_ext.schedule.tasks import Tasks, UnitCosts

P = 8


def table(m: int, units: list[UnitCosts], hop: int = 0) -> Tasks:
    placement = Placement.vee(P)
    durations = Durations.unit(placement).times(FINE, 1)._replace(hop=hop)
    return Tasks(placement, durations, [units] * m)


def idle_and_memory(tasks: Tasks, rows: Rows, size: int) -> tuple[float, float]:
    """Shares of the makespan, and of p microbatches, each of ``size`` a chunk."""
    ends = replay(tasks, rows)
    assert ends is not None
    idle = 1 - sum(tasks.duration) / P / max(ends)
    return idle, max(tasks.peaks(rows)) / (2 * P * size)


# (name, m, K): most idle time, memory. 1F1B of whole microbatches idles 46.7 % at m=8.
EQUAL = [
    ("v-zb", 8, 4, 0.036, 0.344),
    ("v-zb", 4, 4, 0.0681, 0.344),
    ("v-zb", 8, 8, 0.018, 0.235),
    ("v-zb", 2, 4, 0.2132, 0.25),
    ("v-zb", 1, 8, 0.3044, 0.125),
    ("v-half", 8, 4, 0.065, 0.25),
    ("v-min", 8, 4, 0.084, 0.219),
]


@pytest.mark.parametrize(("name", "m", "slices", "idle", "memory"), EQUAL)
def test_idle_time_at_equal_costs(
    name: str, m: int, slices: int, idle: float, memory: float
) -> None:
    tasks = table(m, [UnitCosts()] * slices)
    found = idle_and_memory(tasks, named_rows(name, tasks, 0), slices)
    assert found[0] <= idle and found[1] <= memory


@pytest.mark.parametrize(
    ("attention", "idle", "memory"),
    [("0.1", 0.042, 0.35), ("0.3", 0.053, 0.362), ("0.6", 0.072, 0.38)],
)
def test_balanced_cuts_of_causal_attention(attention: str, idle: float, memory: float) -> None:
    """Even cuts of the same number leave more idle, for the last slice takes longest."""
    found = {}
    for even in (False, True):
        tasks = table(8, slice_costs(4, Fraction(attention), even=even))
        found[even] = idle_and_memory(tasks, named_rows("v-zb", tasks, 0), SHARE)
    assert found[False][0] <= idle and found[False][1] <= memory
    assert found[True][0] > found[False][0]


def test_a_hop_of_a_hundredth() -> None:
    tasks = table(8, [UnitCosts()] * 4, hop=FINE * 4 * 2 // 100)
    idle, _ = idle_and_memory(tasks, named_rows("v-zb", tasks, 50_000), 4)
    assert idle <= 0.051


def test_any_memory_from_one_microbatch_on() -> None:
    """In V-Half's, as fast as its name or faster; below V-Min's one microbatch after the other is
    where the search starts."""
    tasks = table(8, [UnitCosts()] * 4)
    named = named_rows("v-half", tasks, 0)
    most = max(tasks.peaks(named))
    capped = capped_rows(tasks, [most] * P, 0)
    assert max(tasks.peaks(capped)) <= most
    assert max(replay(tasks, capped) or [0]) <= max(replay(tasks, named) or [0])
    times = {}
    for cap in (8, 13):
        rows = capped_rows(tasks, [cap] * P, 0)
        assert max(tasks.peaks(rows)) <= cap
        times[cap] = max(replay(tasks, rows) or [0])
    assert times[13] <= times[8]
    with pytest.raises(ValueError, match="rank 0: the base holds 8, more than the cap of 7"):
        capped_rows(tasks, [7] * P, 0)


def test_stamped_blocks_run_at_any_number_of_slices() -> None:
    """K of each microbatch differs; V blocks and those of one chunk; the memory is the block's and
    the slices' before the last."""
    rng = random.Random(2)
    for _ in range(40):
        pp = rng.randint(2, 7)
        name = rng.choice([*VEES, "zb-h1", "zb-h2"])
        block = named_block(name, pp, 4)
        counts = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
        units = [[UnitCosts(*(rng.randint(1, 9) for _ in range(3)))] * count for count in counts]
        durations = Durations.unit(block.placement)._replace(hop=rng.randint(0, 3))
        tasks = Tasks(block.placement, durations, units)
        rows = stamped(block, tasks)
        assert replay(tasks, rows) is not None
        chunks = block.placement.chunks
        assert max(tasks.peaks(rows)) <= block.peak() + chunks * (max(counts) - 1)


def test_costs_of_cuts_add_up() -> None:
    for attention in (Fraction(0), Fraction(3, 10), Fraction(1)):
        for slices in (1, 3, 4, 8):
            units = slice_costs(slices, attention)
            forward, backward, weight, size = (sum(row) for row in zip(*units))
            assert abs(forward - SHARE) <= slices and abs(size - SHARE) <= slices
            assert abs(backward - (1 + attention) * SHARE) <= slices
            assert abs(weight - (1 - attention) * SHARE) <= slices
            assert max(u.forward for u in units) - min(u.forward for u in units) <= 2
            assert [u.size for u in units] == sorted((u.size for u in units), reverse=True)
