"""Building blocks of the schedules that repeat one (arXiv 2405.15362, below CM, sections 2 to 4).

Stamped, a block gives the order of the schedule of its name at equal costs; the V schedules and
``interleaved-zb`` list-schedule it. In units of F at F = B = W, without hops:

- 1f1b: makespan 3(m+p-1), peak min(m, p-r) microbatches on rank r.
- zb-h1 (arXiv 2401.10241, section 2.3): 3m+p-1 for m >= p, peak min(m, p).
- zb-h2 (section 2.4): 3m+p-1 for m >= 2p-1, every rank's own span 3m, peak min(m, 2p-1).
- interleaved: 3m+3(p-1)/v if p divides m; for m >= 2p the peak is p+(p-1)/v microbatches on rank
  0 (CM, section 1).
- gis, gis-h (PipeOffload, arXiv 2503.01328, section 3.2), in one chunk's costs f, b, w, if the
  group g divides m: bubble (p-1)(f+b) + (v-1)[(p-g)f + max(0, p*b - g(b+w))]; peak ``gis_peak``.
- po (section 3.3): gis-h's block repeated evenly, a microbatch every 3v slots, so that the chunks'
  lifespans add to the memory evenly in time, which is what offload wants. Not reordered. Peak of
  rank i for m >= 2p: min(mv, G(v-1)+p-i) sets with G(c) = K*c + floor(c*gcd(v,K)/v), K = ceil(p/2).
- v-min, v-half, v-zb: max(6m+6p-3k-1, 6m+p-1) chunk units for m >= p under k sets (CM, figure 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from ..actions import Op
from ..engine import Rows, list_schedule, replay
from ..placement import Placement
from .building_block import Block, vee_block
from .longer import cuts, lengthened

_SLOT = 3  # F, B and W (or F and BW) of one chunk


def loop_block(
    pp: int,
    starts: Sequence[int],
    group: int,
    hop: int,
    f_hop: Fraction | int,
    w: Literal["fused", "next", "late"],
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
    """
    chunks = len(starts)
    offsets: dict[tuple[Op, int], int] = {}
    for rank in range(pp):
        skew = math.floor(rank * f_hop)
        ahead = starts[-1] + hop * (pp - 1 - rank)
        latest = starts[-1] + hop * (pp - 1)
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


def v_min_block(pp: int) -> Block:
    """V-Min's block (CM, table 8): 1 down, 1 up, the least memory without lost throughput.

    The turn at the loss depends on whether 3 divides p. For p mod 3 = 2, where the published block
    is 4 chunk units slower than its memory allows, the last hop takes 2 each way and the turn at
    the loss is that of p-2: found by searching blocks that change their steps once.
    """
    if pp == 2:
        return vee_block(pp, down=1, up=1, f_turn=1, loss_turn=2, b_turn=3)
    if pp % 3 == 2:
        steps = [1] * (pp - 2) + [2]
        return vee_block(pp, down=steps, up=steps, f_turn=1, loss_turn=3, b_turn=1)
    return vee_block(pp, down=1, up=1, f_turn=1, loss_turn=3 if pp % 3 == 0 else 1, b_turn=1)


def v_half_block(pp: int) -> Block:
    """V-Half's block (CM, table 9): 2 down, 1 up; the turn at the loss depends on p's parity."""
    return vee_block(pp, down=2, up=1, f_turn=1, loss_turn=4 if pp % 2 == 0 else 1, b_turn=2)


def v_zb_block(pp: int) -> Block:
    """V-ZB's block (CM, section 4.2): 4 down, 2 up; turns of 1 never collide."""
    return vee_block(pp, down=4, up=2, f_turn=1, loss_turn=1, b_turn=1)


@dataclass(frozen=True)
class Vee:
    """A named V schedule, which fixes its memory; at p=2 all have 1F1B's.

    Attributes:
        block: of a number of ranks.
        cap: its activation sets on every rank; 1F1B has 2p.
    """

    block: Callable[[int], Block]
    cap: Callable[[int], int]

    def rows(self, pp: int, microbatches: int) -> Rows:
        """The published order at equal costs, in the numbers of any table of whole microbatches."""
        return _rows(self, pp, microbatches)


_SETTLED = 3  # microbatches a rank; with more, the list schedule repeats every one's passes


@lru_cache(maxsize=8)  # a search for a cap and one for its name begin with the same ones
def _rows(vee: Vee, pp: int, microbatches: int) -> Rows:
    block, few = vee.block(pp), _SETTLED * pp
    tasks = block.table(microbatches)
    if microbatches <= few:
        return list_schedule(tasks, block.rows(tasks), [vee.cap(pp)] * pp)
    rows, short = vee.rows(pp, few), block.table(few)
    ends = replay(short, rows)
    assert ends is not None  # it is the order of a list schedule
    (cut,) = cuts(short, rows, ends, 1, 1)
    return lengthened(short, rows, cut, 1, tasks, microbatches - few)


# From the least memory to the most: about a third of 1F1B's, half, all of it.
VEES = {
    "v-min": Vee(v_min_block, lambda p: 2 * ((p + 4) // 3)),
    "v-half": Vee(v_half_block, lambda p: 2 * ((p + 2) // 2)),
    "v-zb": Vee(v_zb_block, lambda p: 2 * p),
}


def grouped_block(pp: int, chunks: int, group: int, w: Literal["next", "late"]) -> Block:
    """The block of gis(``group``), or with late W's of 1F1B's memory."""
    return loop_block(pp, range(0, group * chunks, group), group, 1, Fraction(3, 2), w)


def gis_peak(pp: int, microbatches: int, chunks: int, group: int) -> list[int]:
    """Activation sets that gis(``group``) may hold, per rank (PipeOffload, section 3.2); exact if
    the group divides m or is larger."""
    inner = min(group, microbatches) * (chunks - 1)
    return [min(microbatches * chunks, inner + pp - rank) for rank in range(pp)]


def _even(step: int, chunks: int) -> list[int]:
    """A chunk every ``step`` slots, moved on where two meet in the period of ``chunks`` slots."""
    cycle = chunks // math.gcd(chunks, step)
    return [step * c + c // cycle for c in range(chunks)]


@dataclass(frozen=True)
class NamedBlock:
    """A block for every number of ranks.

    Attributes:
        make: from ranks and chunks.
        chunks: per rank, if none are asked for.
        any_chunks: any number from ``chunks`` on is possible, not just that one.
    """

    make: Callable[[int, int], Block]
    chunks: int = 1
    any_chunks: bool = False


def _one(vee: Vee) -> Callable[[int, int], Block]:
    return lambda p, v: vee.block(p)


PERIODIC: dict[str, NamedBlock] = {
    "1f1b": NamedBlock(lambda p, v: loop_block(p, [0], 1, 1, 1, "fused")),
    "zb-h1": NamedBlock(lambda p, v: loop_block(p, [0], 1, 1, 2, "late")),
    "zb-h2": NamedBlock(lambda p, v: loop_block(p, [0], 1, 2, 4, "late")),
    "interleaved": NamedBlock(
        lambda p, v: loop_block(p, range(0, p * v, p), p, 2, 3, "fused"), 2, True
    ),
    "interleaved-zb": NamedBlock(lambda p, v: grouped_block(p, v, p, "late"), 2, True),
    "gis": NamedBlock(lambda p, v: grouped_block(p, v, p, "next"), 2, True),
    "gis-h": NamedBlock(lambda p, v: grouped_block(p, v, -(-p // 2), "next"), 2, True),
    "po": NamedBlock(
        lambda p, v: loop_block(p, _even(-(-p // 2), v), 1, 1, Fraction(3, 2), "next"), 2, True
    ),
    **{name: NamedBlock(_one(vee), 2) for name, vee in VEES.items()},
}


def named_block(name: str, pp: int, chunks: int | None = None) -> Block:
    """The block of a schedule.

    Args:
        name: one of ``PERIODIC``.
        pp: pipeline ranks, >= 2.
        chunks: model chunks per rank; default what the schedule uses.

    Raises:
        ValueError: unknown name, or numbers the block does not exist for.
    """
    if name not in PERIODIC:
        raise ValueError(f"no building block {name!r}; known: {', '.join(PERIODIC)}")
    named = PERIODIC[name]
    chunks = named.chunks if chunks is None else chunks
    if pp < 2:
        raise ValueError(f"{name} needs at least 2 pipeline ranks, got pp={pp}")
    if chunks < named.chunks or (chunks > named.chunks and not named.any_chunks):
        takes = f"{named.chunks} chunks per rank{' or more' if named.any_chunks else ''}"
        raise ValueError(
            f"the block of {name} has {takes}, got {chunks}; give chunks={named.chunks}"
        )
    return named.make(pp, chunks)
