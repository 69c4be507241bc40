"""Building blocks of the schedules that repeat one (arXiv 2405.15362, below CM, sections 2 to 4).

Stamped, a block gives the order of the schedule of its name at equal costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from ..actions import Op
from ..placement import Placement
from .building_block import Block, vee_block
from .vee import v_half_block, v_min_block, v_zb_block

_SLOT = 3  # F, B and W (or F and BW) of one chunk


def loop_block(
    pp: int,
    starts: Sequence[int],
    group: int,
    hop: int,
    f_hop: Fraction | int,
    w: Literal["fused", "next", "late"],
    wait: int = 0,
) -> Block:
    """A block on Megatron's placement; every slot of 3 holds a forward and a backward pass.

    Args:
        pp: pipeline ranks.
        starts: of every chunk, the slot of its F on rank 0; backward passes take the chunks in
            reverse order at the same slots, later.
        group: microbatches that run a slot apart; 1: one every ``len(starts)`` slots.
        hop: slots from rank to rank and back, F and B together: 1 is the least.
        f_hop: time from one rank to the next for F; B takes the rest, on average.
        w: W in one with B, directly after it, or so late that every rank waits for the first.
        wait: slots between the last F and the first B of the last rank, beyond the least.
    """
    chunks = len(starts)
    offsets: dict[tuple[Op, int], int] = {}
    for rank in range(pp):
        skew = math.floor(rank * f_hop)
        ahead = starts[-1] + wait + hop * (pp - 1 - rank)
        latest = starts[-1] + wait + hop * (pp - 1)
        for chunk, start in enumerate(starts):
            offsets[Op.F, chunk * pp + rank] = _SLOT * start + skew
            stage = (chunks - 1 - chunk) * pp + rank
            at = _SLOT * (start + ahead) + skew + 1
            offsets[Op.BW if w == "fused" else Op.B, stage] = at
            if w != "fused":
                slot = start + (latest if w == "late" else ahead)
                offsets[Op.W, stage] = _SLOT * slot + skew + 2
    step = _SLOT if group > 1 else 0
    return Block(Placement.loop(pp, chunks), _SLOT * chunks * group, offsets, group, step)


def one_f_one_b_vee_block(pp: int) -> Block:
    """1F1B in V placement, about 2/3 of 1F1B's memory (CM's 1F1B-V), found by search.

    F takes 1 a hop. Equal hops of B collide, so in every three of them each direction takes 5
    once and 2 twice. The last ranks' turns are the least that are possible.
    """
    from_last = range(pp - 2, -1, -1)
    b_down = [5 if hop % 3 == 0 else 2 for hop in from_last]
    b_up = [5 if hop % 3 == 1 else 2 for hop in from_last]
    loss_turn = 1 if pp % 3 else 4
    block = vee_block(
        pp, 1, 1, f_turn=1, loss_turn=loss_turn, b_turn=2, b_steps=(b_down, b_up)
    )  # fmt: skip
    # Every W directly follows its B: one pass.
    offsets: dict[tuple[Op, int], int] = {
        (Op.BW if op is Op.B else op, s): at
        for (op, s), at in block.offsets.items()
        if op is not Op.W
    }
    return replace(block, offsets=offsets)


def _even(step: int, chunks: int) -> list[int]:
    """A chunk every ``step`` slots, moved on where two meet in the period of ``chunks`` slots."""
    cycle = chunks // math.gcd(chunks, step)
    return [step * c + c // cycle for c in range(chunks)]


def _grouped(pp: int, chunks: int, group: int, w: Literal["next", "late"]) -> Block:
    return loop_block(pp, range(0, group * chunks, group), group, 1, Fraction(3, 2), w)


@dataclass(frozen=True)
class NamedBlock:
    """A block for every number of ranks.

    Attributes:
        make: from ranks, chunks and microbatches.
        chunks: per rank, if none are asked for.
        any_chunks: any number from ``chunks`` on is possible, not just that one.
        grows: its lifespans grow with the number of microbatches.
    """

    make: Callable[[int, int, int], Block]
    chunks: int = 1
    any_chunks: bool = False
    grows: bool = False


PERIODIC: dict[str, NamedBlock] = {
    "gpipe": NamedBlock(
        lambda p, v, m: loop_block(p, [0], 1, 1, 1, "fused", wait=m - 1), grows=True
    ),
    "1f1b": NamedBlock(lambda p, v, m: loop_block(p, [0], 1, 1, 1, "fused")),
    "eager-1f1b": NamedBlock(lambda p, v, m: loop_block(p, [0], 1, 2, 4, "fused")),
    "zb-h1": NamedBlock(lambda p, v, m: loop_block(p, [0], 1, 1, 2, "late")),
    "zb-h2": NamedBlock(lambda p, v, m: loop_block(p, [0], 1, 2, 4, "late")),
    "interleaved": NamedBlock(
        lambda p, v, m: loop_block(p, range(0, p * v, p), p, 2, 3, "fused"), 2, True
    ),
    "interleaved-zb": NamedBlock(lambda p, v, m: _grouped(p, v, p, "late"), 2, True),
    "gis": NamedBlock(lambda p, v, m: _grouped(p, v, p, "next"), 2, True),
    "gis-h": NamedBlock(lambda p, v, m: _grouped(p, v, -(-p // 2), "next"), 2, True),
    "po": NamedBlock(
        lambda p, v, m: loop_block(p, _even(-(-p // 2), v), 1, 1, Fraction(3, 2), "next"), 2, True
    ),
    "1f1b-v": NamedBlock(lambda p, v, m: one_f_one_b_vee_block(p), 2),
    "v-min": NamedBlock(lambda p, v, m: v_min_block(p), 2),
    "v-half": NamedBlock(lambda p, v, m: v_half_block(p), 2),
    "v-zb": NamedBlock(lambda p, v, m: v_zb_block(p), 2),
}


def named_block(name: str, pp: int, microbatches: int, chunks: int | None = None) -> Block:
    """The block of a schedule.

    Args:
        name: one of ``PERIODIC``.
        pp: pipeline ranks, >= 2.
        microbatches: of one iteration; only ``gpipe``'s block depends on it.
        chunks: model chunks per rank; default what the schedule uses.

    Raises:
        ValueError: unknown name, or numbers the block does not exist for.
    """
    if name not in PERIODIC:
        raise ValueError(
            f"no building block {name!r}; known: {', '.join(PERIODIC)}, or a file. Schedules with "
            "two copies of the weights (Chimera, GEMS) are not expressible: a stage has one rank"
        )
    named = PERIODIC[name]
    chunks = named.chunks if chunks is None else chunks
    if pp < 2:
        raise ValueError(f"{name} needs at least 2 pipeline ranks, got pp={pp}")
    if chunks < named.chunks or (chunks > named.chunks and not named.any_chunks):
        takes = f"{named.chunks} chunks per rank{' or more' if named.any_chunks else ''}"
        raise ValueError(
            f"the block of {name} has {takes}, got {chunks}; give chunks={named.chunks}"
        )
    return named.make(pp, chunks, microbatches)
