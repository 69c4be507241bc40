"""A budget in bytes: what fits it, in which whole sets, and what is said where nothing does."""

from __future__ import annotations

import re

import pytest

from megatron_ext._input import parse_bytes, size_text
from megatron_ext.plan.budget import Budget
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import MESSAGES, message_bytes, stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.profile import Profile
from megatron_ext.plan.times import PassTimes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import GENERATORS, NAMES, generate
from megatron_ext.schedule.generators.cap import v_cap_limits
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.simulate import simulate

LINE = (
    "--num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 1024 "
    "--micro-batch-size 1 --global-batch-size 12 --pipeline-model-parallel-size 4 --bf16 "
    "--untie-embeddings-and-output-weights --transformer-impl local"
)
JOB = job_of(read(LINE.split())[0])
P, M = 4, 12
COSTS = Costs.of(3, 4, 2)


def budget(size, profile=None):
    return Budget(JOB, size, lambda stages: even_split(16, stages), profile)


def everything():
    """(bytes of the fullest rank, makespan, name, option) of all schedules, one by one."""
    found = []
    low, high = v_cap_limits(P)
    for name in NAMES:
        options = [{}]
        if GENERATORS[name].takes_group_size:
            options = [{"group_size": g} for g in (3, 4)]
        if GENERATORS[name].takes_memory_cap:
            options = [{"memory_cap": cap} for cap in range(low, high + 1)]
        for option in options:
            v = 2 if GENERATORS[name].any_chunks else GENERATORS[name].default_chunks
            schedule = generate(name, P, M, v, COSTS, **option)
            size = budget(1).worst(schedule).total
            found.append((size, simulate(schedule).makespan, name, option.get("memory_cap")))
    return found


ALL = everything()
SMALLEST = min(ALL)[0]


@pytest.mark.parametrize("size", sorted({size for size, *_ in ALL})[::3])
def test_the_fastest_of_all_that_fit(size):
    found = budget(size).fastest(P, M, 2, COSTS)
    fitting = [one for one in ALL if one[0] <= size]
    assert simulate(found.schedule).makespan == min(one[1] for one in fitting)
    assert budget(size).worst(found.schedule).total <= size
    assert f"fit {size_text(size)} a rank: a cap of " in found.note


def test_the_largest_cap_that_fits():
    sizes = {cap: size for size, _, name, cap in ALL if name == "v-cap"}
    for cap, size in sizes.items():
        found = budget(size).fastest(P, M, 2, COSTS, ["v-cap"])
        assert found.shape.memory_cap == max(c for c, s in sizes.items() if s <= size) >= cap
        held = re.search(r"a cap of (\d+) activation sets .* it holds (\d+) there", found.note)
        assert held and int(held[1]) >= int(held[2])


def test_nothing_fits():
    with pytest.raises(PlanError) as error:
        budget(SMALLEST - 1).fastest(P, M, 2, COSTS)
    text = str(error.value)
    assert f"the smallest budget that one fits is {size_text(SMALLEST)} (v-min)" in text
    assert re.search(r"rank \d binds with .* of ", text)
    said = parse_bytes(re.search(r"fits is (\S+)", text)[1])
    assert said < 1.01 * SMALLEST
    assert budget(said).worst(budget(said).fastest(P, M, 2, COSTS).schedule).total == SMALLEST


@pytest.mark.parametrize("split", [False, True])
def test_whole_sets_of_the_largest_size(split):
    """By hand: what is free on each rank, in sets as large as its largest."""
    placement, size = Placement.vee(P), 200 << 20
    stages = stage_bytes(JOB, even_split(16, 8))
    expected = []
    for row in placement.stages:
        sets = [stages[s].sets for s in row]
        free = size - sum(stages[s].states.total for s in row) - MESSAGES * message_bytes(JOB)
        free -= max(one.again + one.layer + one.logits for one in sets)
        largest = max(max(s.until_b, s.until_w if split else 0) for s in sets)
        expected.append(free // largest)
    assert budget(size).sets(placement, split) == expected
    assert min(expected) == expected[0] > 0, "both ends of the model are on rank 0"
    assert budget(size).cap(placement, split) * 8 == expected[0]


def test_no_room_for_a_set():
    with pytest.raises(PlanError, match=r"1MiB a rank leave no room .* rank 0, which has .*MiB"):
        budget(1 << 20).cap(Placement.vee(P), True)


def test_measured_bytes_replace_estimated_ones():
    """Sets twice as large: what just fitted does not."""
    estimated = [stage.sets.until_b for stage in stage_bytes(JOB, even_split(16, 8))]
    profile = Profile(
        1,
        (2,) * 8,
        (PassTimes(0.1, 0.1, 0.1),) * 8,
        set_bytes=tuple(2 * x for x in estimated),
        weight_set_bytes=tuple(2 * x for x in estimated),
    )
    schedule = generate("v-half", P, M, 2)
    size = budget(1).worst(schedule).total
    assert budget(size, profile).worst(schedule).total > size
    assert "measured" in budget(size, profile).describe(schedule)
    assert "estimated" in budget(size).describe(schedule)


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 << 30), ("1.5KiB", 1536), ("2MB", 2000000), ("512", 512)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    assert size <= parse_bytes(size_text(size)) <= 1.006 * size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1XB", "0B", "1e400GiB"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="a size must be a number of bytes > 0"):
        parse_bytes(text)
