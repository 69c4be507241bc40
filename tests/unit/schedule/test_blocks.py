"""Building blocks: the periodic schedules, their lifespans, files of a user's own."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from megatron_ext.schedule import NAMES, Action, Op, Schedule, block_file, check, generate, simulate
from megatron_ext.schedule.block_file import block_from_json, block_to_json
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.generators import grouped
from megatron_ext.schedule.generators.blocks import PERIODIC, named_block
from megatron_ext.schedule.generators.building_block import Block
from megatron_ext.schedule.lifespan import lifespans
from tests.support import ROOT

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


WAVE = {  # two V's, one after the other: Hanayo's placement
    "format": "megatron-ext-block/1",
    "placement": [[0, 3, 4, 7], [1, 2, 5, 6]],
    "interval": 12,
    "offsets": {
        "F": [0, 1, 2, 3, 4, 5, 6, 7],
        "B": [17, 16, 15, 13, 11, 10, 9, 8],
        "W": [18, 19, 20, 14, 21, 11, 12, 10],
    },
}


def sizes(name: str) -> list[tuple[int, int]]:
    named = PERIODIC[name]
    chunks = (2, 5) if named.any_chunks else (named.chunks,)
    return [(p, v) for p in (2, 3, 4, 7, 8) for v in chunks]


@pytest.mark.parametrize("name", PERIODIC)
def test_every_block_can_be_executed_and_repeated(name: str) -> None:
    for p, v in sizes(name):
        m = 3 * p
        block = named_block(name, p, m, v)
        block.validate()
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
            assert named_block(name, p, m, v).stamp(m) == expected, (p, v, m)


def test_groups_of_interleaved_zb_shrink_at_the_end_only_as_far_as_the_ring_allows() -> None:
    """On the groups themselves: what is generated is the fastest of several candidates."""
    assert grouped._groups(4, 10) == [4, 4, 2], "half of p is enough for the cool-down"
    assert grouped._groups(7, 15) == [7, 5, 3], "the ring takes (2p-1)/3, not half of 8"


@pytest.mark.parametrize("name", [name for name in PERIODIC if name != "gpipe"])
def test_peak_by_lifespan_is_the_simulated_one(name: str) -> None:
    """Equation 1 is an upper bound; counted exactly, lifespans give the simulated peak."""
    for p, v in sizes(name):
        m = 4 * p
        block = named_block(name, p, m, v)
        found = lifespans(block, m)
        run = simulate(Schedule(name, block.placement, m, tuple(map(tuple, block.stamp(m)))))
        assert found.peak == run.peak_sets
        assert all(bound >= peak for bound, peak in zip(found.bound, found.peak))
        assert block.peak() == max(found.peak)
        if v == 1:  # one stage a rank: the bound is exact
            assert found.bound == found.peak
        if block.group == 1:
            ceil = [-(-life // block.interval) for life in found.lifespan]
            assert found.bound == [sum(ceil[s] for s in row) for row in block.placement.stages]


def test_published_lifespans_and_peaks() -> None:
    """Lifespans and memory of 2405.15362, table 1, and of 2401.10241: p ranks, M = 1F1B's p."""
    for p in (3, 4, 5, 12):
        found = {n: lifespans(named_block(n, p, 4 * p), 4 * p) for n in PERIODIC}
        # 1F1B: 6d at T = 6, here 3p at T = 3; stage i has (p-i)/p of M.
        assert found["1f1b"].lifespan == [3 * (p - s) for s in range(p)]
        assert found["1f1b"].peak == [p - s for s in range(p)]
        assert found["zb-h1"].peak == [p] * p
        assert found["zb-h2"].peak == [2 * p - 1] * p
        assert found["eager-1f1b"].peak == [2 * (p - s) - 1 for s in range(p)]
        assert max(found["gpipe"].peak) == 4 * p
        # interleaved: 1 + (p-1)/(pv) of M on rank 0.
        assert max(found["interleaved"].peak) == 2 * p + p - 1
        assert max(found["v-min"].peak) == 2 * ((p + 4) // 3)  # M/3
        assert max(found["v-half"].peak) == 2 * ((p + 2) // 2)  # M/2
        assert max(found["v-zb"].peak) == 2 * p  # M
        assert max(found["1f1b-v"].peak) == (4 * p + {1: 2, 2: 4, 0: 6}[p % 3]) // 3  # 2/3 M
        # The longest lifespans: 4d, 6d, 12d, but for the turns and W's waits.
        for name, times in (("v-min", 4), ("v-half", 6), ("v-zb", 12)):
            assert abs(max(found[name].lifespan) - times * p) <= 8, name


def test_published_bubbles() -> None:
    """In passes of one chunk: 6d, 4d, 3d, 0 (table 1), exactly as the schedules have them."""
    for p in (4, 6):
        m = 4 * p
        for name in ("v-min", "v-half", "v-zb"):
            found = lifespans(named_block(name, p, m), m)
            run = simulate(generate(name, p, m))
            assert found.reordered == run.bubble, name
            assert found.squeezed >= found.reordered
        found = lifespans(named_block("1f1b", p, m), m)
        assert found.reordered == found.squeezed == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(
    ("names", "balance"),
    [
        (("1f1b", "eager-1f1b", "interleaved", "gis", "gis-h", "po"), "unbalanced"),
        (("zb-h1", "zb-h2", "interleaved-zb"), "by late W"),
        (("v-min", "v-half", "v-zb", "1f1b-v"), "balanced"),
    ],
)
def test_balance_is_the_placements(names: tuple[str, ...], balance: str) -> None:
    for name in names:
        for p, v in sizes(name):
            found = lifespans(named_block(name, p, 3 * p, v), 3 * p)
            assert found.balance == balance, (p, v)
            assert found.why.startswith("efficient: " if balance == "balanced" else "not efficient")


def test_gpipe_grows() -> None:
    for m in (4, 8, 16):
        found = lifespans(named_block("gpipe", 4, m), m, grows=True)
        assert found.peak == found.bound == [m] * 4
        assert found.balance == "grows"
        assert found.squeezed == Fraction(3, m + 3)


@pytest.mark.parametrize("name", PERIODIC)
def test_files_hold_the_block(name: str) -> None:
    block = named_block(name, 5, 8)
    again = block_from_json(json.loads(json.dumps({**block_to_json(block), "report": {}})))
    assert again == block


def test_a_block_of_ones_own() -> None:
    block = block_from_json(WAVE)
    found = lifespans(block, 8)
    assert found.peak == [5, 6] and found.bound == [6, 6]
    assert found.balance == "balanced"
    check(Schedule("wave", block.placement, 8, tuple(map(tuple, block.stamp(8)))))
    text = (block_file.__doc__ or "").split("\n\n")[1]
    assert isinstance(block_from_json(json.loads(text)), Block)


VALID = {
    "format": "megatron-ext-block/1",
    "placement": [[0, 3], [1, 2]],
    "interval": 6,
    "offsets": {"F": [0, 1, 2, 3], "B": [7, 6, 5, 4], "W": [8, 9, 10, 5]},
}


def offsets(**other: list[int]) -> dict[str, object]:
    return {"offsets": {**VALID["offsets"], **other}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'expected "format": "megatron-ext-block/1", found \'other\''),
        ({"period": 6}, "unknown field 'period'; fields are format, placement, interval"),
        ({"placement": [0, 1]}, '"placement" must list the stages of every rank'),
        ({"placement": [[0, 3], [1, 1]]}, "placement must hold every stage 0..3 once"),
        ({"interval": 0}, '"interval" must be a whole number from 1'),
        ({"interval": 5}, "fall on the same time modulo the interval, 5"),
        ({"group": 2}, '"step" within a group must be a whole number from 1 to 5, got 0'),
        ({"step": 2}, '"step" within a group must be a whole number from 0 to 0, got 2'),
        ({"offsets": {"F": [0, 1, 2, 3]}}, '"offsets" must be of F, B and W, or of F and BW'),
        (offsets(F=[0, 1, 2]), '"F" must list 4 offsets, one a stage, got [0, 1, 2]'),
        (offsets(F=[0, 1, 2, -1]), "F of stage 3 must be a whole number from 0"),
        (
            offsets(F=[0, 1, 1, 3]),
            "F of stage 2 starts at 1, but its input, the result of F of stage 1, is there at 2",
        ),
        (offsets(B=[7, 6, 5, 3]), "B of stage 3 starts at 3, but its input, the result of F"),
        (offsets(B=[7, 6, 4, 4]), "B of stage 2 starts at 4, but its input, the result of B"),
        (offsets(W=[8, 6, 10, 5]), "W of stage 1 starts at 6, but its input, the result of B"),
        (
            offsets(W=[12, 9, 10, 5]),
            "rank 0: F of stage 0 at 0 and W of stage 0 at 12 fall on the same time modulo the "
            "interval, 6; move one of them",
        ),
    ],
)
def test_wrong_files(change: dict[str, object], message: str) -> None:
    block_from_json(VALID)
    with pytest.raises(ValueError) as refused:
        block_from_json({**VALID, **change})
    assert message in str(refused.value)


def test_fused_passes_and_groups_collide() -> None:
    """BW takes two units, and every microbatch of a group is checked."""
    fused = block_to_json(named_block("1f1b", 2, 4))
    assert fused["offsets"] == {"F": [0, 1], "BW": [4, 2]}
    with pytest.raises(ValueError, match="BW of stage 0 at 5 fall on the same time"):
        block_from_json({**fused, "offsets": {"F": [0, 1], "BW": [5, 2]}})
    with pytest.raises(ValueError, match="is there at 4; start it at 4"):
        block_from_json({**fused, "offsets": {"F": [0, 1], "BW": [3, 2]}})
    groups = block_to_json(named_block("interleaved", 2, 4))
    assert (groups["interval"], groups["group"], groups["step"]) == (12, 2, 3)
    with pytest.raises(ValueError, match="fall on the same time modulo the interval, 12"):
        block_from_json({**groups, "step": 6})


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "message"),
    [
        ("chimera", 4, None, "no building block 'chimera'; known: gpipe, 1f1b"),
        ("1f1b", 1, None, "1f1b needs at least 2 pipeline ranks, got pp=1"),
        ("v-half", 4, 3, "the block of v-half has 2 chunks per rank, got 3"),
        ("interleaved", 4, 1, "has 2 chunks per rank or more, got 1; give chunks=2"),
    ],
)
def test_names_and_sizes(name: str, pp: int, chunks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_block(name, pp, 8, chunks)


def test_few_microbatches_hold_less() -> None:
    """The bound counts no more microbatches than there are."""
    found = lifespans(named_block("v-zb", 8, 2), 2)
    assert max(found.bound) == 4
    assert found.peak == peak_sets(named_block("v-zb", 8, 2).stamp(2))
    assert max(found.peak) <= 4


def test_numbers_of_the_page() -> None:
    """building-blocks.md's table: p = 8, m = 32; no schedule is slower than its block."""
    text = (ROOT / "docs" / "concepts/building-blocks.md").read_text()
    rows = re.findall(r"(?m)^\| `([a-z0-9-]+)` \| (.*) \|$", text)
    assert [name for name, _ in rows] == list(PERIODIC)
    for name, row in rows:
        cells = row.split(" | ")
        found = lifespans(named_block(name, 8, 32), 32, grows=name == "gpipe")
        chunks = found.block.placement.chunks
        peak = max(found.peak) / chunks
        assert cells[:-1] == [
            str(chunks),
            f"{min(found.lifespan)} to {max(found.lifespan)}",
            f"{max(found.bound) / chunks:g}",
            f"{peak:g}",
            f"{100 * peak / 8:.1f}".removesuffix(".0") + " %",
            f"{float(100 * found.reordered):.1f} %",
        ], name
        assert found.balance.split()[0] in cells[-1]
        if name in NAMES:
            run = simulate(generate(name, 8, 32))
            assert run.bubble <= (found.squeezed if name == "po" else found.reordered)
            assert max(run.peak_sets) <= max(found.peak)
