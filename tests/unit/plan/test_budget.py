"""A budget in bytes: what fits it, in which whole sets, and what is said where nothing does."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from megatron_ext._input import parse_bytes, size_text
from megatron_ext.plan.budget import Budget
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import MESSAGES, message_bytes, stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.schedule import (
    AUTO,
    Costs,
    Link,
    OffloadSpec,
    ScheduleSpec,
    select,
)
from megatron_ext.schedule.generators import GENERATORS, NAMES, generate
from megatron_ext.schedule.generators.cap import LEAST_CAP
from megatron_ext.schedule.named import CapExceeded
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


def budget(size):
    return Budget(JOB, size, lambda stages: even_split(16, stages))


def fastest(cap, *names):
    """What the selector takes; the costs are for two chunks."""
    spec = ScheduleSpec(AUTO, P, M, 2, COSTS, cap)
    return select(replace(spec, names=names or NAMES))


@functools.cache
def everything():
    """(bytes of the fullest rank, makespan, name, option) of all schedules, one by one."""
    found = []
    for name in NAMES:
        options = [{}]
        if GENERATORS[name].takes_group_size:
            options = [{"group_size": g} for g in (3, 4)]
        if GENERATORS[name].takes_memory_cap:
            options = [{"memory_cap": cap} for cap in range(LEAST_CAP, 2 * P + 1)]
        for option in options:
            v = 2 if GENERATORS[name].any_chunks else GENERATORS[name].default_chunks
            schedule = generate(name, P, M, v, COSTS, **option)
            size = budget(1).worst(schedule).total
            found.append((size, simulate(schedule).makespan, name, option.get("memory_cap")))
    return found


def test_the_fastest_of_all_that_fit():
    sizes = sorted({size for size, *_ in everything()})[::3]
    assert len(sizes) > 3
    for size in sizes:
        found = fastest(budget(size))
        fitting = [one for one in everything() if one[0] <= size]
        assert simulate(found.schedule).makespan == min(one[1] for one in fitting), size
        assert budget(size).worst(found.schedule).total <= size
        note = found.schedule.note
        assert re.search(rf"fit in {size_text(size)} a rank: makespan \S+, a cap of ", note)


def test_the_largest_cap_that_fits():
    sizes = {cap: size for size, _, name, cap in everything() if name == "v-cap"}
    for cap, size in sizes.items():
        found = select(ScheduleSpec("v-cap", P, M, 2, COSTS, budget(size)))
        assert found.spec.cap.share * 2 * P == max(c for c, s in sizes.items() if s <= size) >= cap
        note = found.schedule.note
        held = re.search(r"a cap of (\d+) activation sets .* it holds (\d+) there", note)
        assert held and int(held[1]) >= int(held[2])


def test_nothing_fits():
    smallest = min(everything())[0]
    with pytest.raises(CapExceeded) as error:
        fastest(budget(smallest - 1))
    text = str(error.value)
    assert f"the least of all is {size_text(smallest)} (v-cap), where rank" in text
    assert re.search(r"rank \d binds with .* of ", text)
    enough = parse_bytes(error.value.enough)
    assert enough < 1.01 * smallest
    assert budget(enough).needed(fastest(budget(enough)).schedule) == smallest


@pytest.mark.parametrize("split", [False, True])
def test_whole_sets_of_the_largest_size(split):
    """By hand: what is free on each rank, in sets as large as its largest."""
    placement, size = Placement.vee(P), 200 << 20
    stages = stage_bytes(JOB, even_split(16, 8))
    expected = []
    for row in placement.stages:
        sets = [stages[s].sets for s in row]
        free = size - sum(stages[s].states.total for s in row) - MESSAGES * message_bytes(JOB)
        free -= max(one.recompute_bytes + one.layer + one.logits for one in sets)
        largest = max(max(s.bytes_f_to_b, s.bytes_b_to_w if split else 0) for s in sets)
        expected.append(free // largest)
    assert budget(size).room(placement, split) == expected
    assert min(expected) == expected[0] > 0, "both ends of the model are on rank 0"
    assert budget(size).sets(placement, split) == expected[0]


RANDOM = (
    "--recompute-granularity full --recompute-method uniform",
    "--recompute-granularity selective --recompute-modules mlp",
    "--pp-cheap-recompute",
    "--hidden-dropout 0 --attention-dropout 0",
    "--swiglu --disable-bias-linear",
    "--num-experts 4 --moe-ffn-hidden-size 64",
    "--micro-batch-size 3",
)


def test_no_room_for_a_set():
    with pytest.raises(PlanError, match=r"1MiB a rank leave no room .* rank 0, which has .*MiB"):
        budget(1 << 20).sets(Placement.vee(P), True)


def test_with_offload_a_cap_that_is_enough():
    """What is kept in sets under offload: the size that the error names is enough."""
    away = OffloadSpec("half", Link.of(P, "0.25"))
    sizes = (budget(n << 20) for n in range(1, 1000))
    small = next(b for b in sizes if b.room(Placement.vee(P), True)[0] == 1)
    spec = ScheduleSpec("v-zb", P, M, 2, COSTS, small, offload=away)
    with pytest.raises(CapExceeded, match="keeps . activation sets on a device") as error:
        select(spec)
    found = select(replace(spec, cap=budget(parse_bytes(error.value.enough))))
    assert "activation sets of estimated size on a device" in found.schedule.note


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 << 30), ("1.5KiB", 1536), ("2MB", 2000000), ("512", 512)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    assert size <= parse_bytes(size_text(size)) <= 1.006 * size
