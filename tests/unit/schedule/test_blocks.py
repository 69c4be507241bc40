"""Building blocks: of the schedules that repeat one."""

from __future__ import annotations

import pytest

from megatron_ext.schedule import Action, Op, Schedule, check
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.generators import grouped
from megatron_ext.schedule.generators.blocks import PERIODIC, named_block

# The published orders, rank r of p with v chunks: the group of microbatches that passes a chunk in
# a row; how many passes of a unit's B, and of its W, come after its F.
FIXED = {
    "1f1b": lambda r, p, v: (1, p - 1 - r, None),
    "interleaved": lambda r, p, v: (p, 2 * (p - 1 - r) + (v - 1) * p, None),
    "zb-h1": lambda r, p, v: (1, p - 1 - r, p - 1),
    "zb-h2": lambda r, p, v: (1, 2 * (p - 1 - r), 2 * (p - 1)),
    "interleaved-zb": lambda r, p, v: (p, p * (v - 1) + p - 1 - r, p * (v - 1) + p - 1),
    "gis": lambda r, p, v: (p, p * (v - 1) + p - 1 - r, p * (v - 1) + p - 1 - r),
    "gis-h": lambda r, p, v: (h := -(-p // 2), h * (v - 1) + p - 1 - r, h * (v - 1) + p - 1 - r),
}


def published(name: str, rank: int, p: int, v: int, m: int) -> list[Action]:
    """A rank's passes, written without a block."""
    group, b_late, w_late = FIXED[name](rank, p, v)
    whole = range(-(-m // group))
    units = [(c, g * group + i) for g in whole for c in range(v) for i in range(group)]
    row = []
    for x in range(len(units) + max(b_late, w_late or 0)):
        for op, late in (Op.F, 0), (Op.BW if w_late is None else Op.B, b_late), (Op.W, w_late):
            if late is not None and 0 <= x - late < len(units):
                chunk, microbatch = units[x - late]
                chunk = chunk if op is Op.F else v - 1 - chunk
                row.append(Action(op, chunk * p + rank, microbatch))
    return [action for action in row if action.microbatch < m]


def sizes(name: str) -> list[tuple[int, int]]:
    named = PERIODIC[name]
    chunks = (2, 5) if named.any_chunks else (named.chunks,)
    return [(p, v) for p in (2, 3, 4, 7, 8) for v in chunks]


@pytest.mark.parametrize("name", PERIODIC)
def test_every_block_can_be_executed_and_repeated(name: str) -> None:
    for p, v in sizes(name):
        m = 3 * p
        block = named_block(name, p, v)
        work = {
            sum(2 if op.value == "BW" else 1 for op, s in block.offsets if s in row)
            for row in block.placement.stages
        }
        assert work == {3 * v}
        assert block.interval == 3 * v * block.group  # no idle time in the steady state
        check(Schedule(name, block.placement, m, tuple(map(tuple, block.stamp(m)))))


@pytest.mark.parametrize("name", FIXED)
def test_a_repeated_block_is_the_schedule_of_its_name(name: str) -> None:
    for p, v in sizes(name):
        for m in (1, p, 2 * p + 1, 3 * p):
            expected = [published(name, rank, p, v, m) for rank in range(p)]
            assert named_block(name, p, v).stamp(m) == expected, (p, v, m)


def test_groups_of_interleaved_zb_shrink_at_the_end_only_as_far_as_the_ring_allows() -> None:
    """On the groups themselves: what is generated is the fastest of several candidates."""
    assert grouped._groups(4, 10) == [4, 4, 2], "half of p is enough for the cool-down"
    assert grouped._groups(7, 15) == [7, 5, 3], "the ring takes (2p-1)/3, not half of 8"


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "message"),
    [
        ("chimera", 4, None, "no building block 'chimera'; known: 1f1b"),
        ("1f1b", 1, None, "1f1b needs at least 2 pipeline ranks, got pp=1"),
        ("v-half", 4, 3, "the block of v-half has 2 chunks per rank, got 3"),
        ("interleaved", 4, 1, "has 2 chunks per rank or more, got 1; give chunks=2"),
    ],
)
def test_names_and_sizes(name: str, pp: int, chunks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_block(name, pp, chunks)


def test_published_peaks() -> None:
    """Memory of 2405.15362, table 1, and of 2401.10241: p ranks, 1F1B's is p."""
    for p in (3, 4, 5, 12):
        peaks = {n: peak_sets(named_block(n, p).stamp(4 * p)) for n in PERIODIC}
        assert peaks["1f1b"] == [p - s for s in range(p)]
        assert peaks["zb-h1"] == [p] * p
        assert peaks["zb-h2"] == [2 * p - 1] * p
        # interleaved: 1 + (p-1)/(pv) of M on rank 0.
        assert max(peaks["interleaved"]) == 2 * p + p - 1
        assert max(peaks["v-min"]) == 2 * ((p + 4) // 3)  # M/3
        assert max(peaks["v-half"]) == 2 * ((p + 2) // 2)  # M/2
        assert max(peaks["v-zb"]) == 2 * p  # M
        for name in PERIODIC:
            assert named_block(name, p).peak() == max(peaks[name]), name
