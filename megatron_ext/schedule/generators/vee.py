"""V schedules: two chunks a rank, first and last stage both on rank 0, memory balanced.

A named one fixes the memory, its ``k`` activation sets on every rank. Its order at equal costs is
the published one: stamp the block, list-schedule it at unit times under k.
"""

from __future__ import annotations

from collections.abc import Callable

from ..actions import RankActions
from .building_block import Block, vee_block
from .list_scheduler import list_schedule


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


def v_min_cap(pp: int) -> int:
    """V-Min's activation sets per rank, about a third of 1F1B's 2p."""
    return 2 * ((pp + 4) // 3)


def v_half_block(pp: int) -> Block:
    """V-Half's block (CM, table 9): 2 down, 1 up; the turn at the loss depends on p's parity."""
    return vee_block(pp, down=2, up=1, f_turn=1, loss_turn=4 if pp % 2 == 0 else 1, b_turn=2)


def v_half_cap(pp: int) -> int:
    """V-Half's activation sets per rank, about half of 1F1B's 2p."""
    return 2 * ((pp + 2) // 2)


def v_zb_block(pp: int) -> Block:
    """V-ZB's block (CM, section 4.2): 4 down, 2 up; turns of 1 never collide."""
    return vee_block(pp, down=4, up=2, f_turn=1, loss_turn=1, b_turn=1)


def v_min(pp: int, microbatches: int) -> RankActions:
    """V-Min: about a third of 1F1B's memory.

    Cap k = 2*floor((p+4)/3) activation sets on every rank. At F=B=W and m >= p the makespan is
    max(6m+6p-3k-1, 6m+p-1) chunk units for every p: CM's bound (its figure 13), at p=2 (where k is
    1F1B's memory) the work of a rank and the way to the last. Any F or B above the mean of F, B
    and W costs throughput.
    """
    block = v_min_block(pp)
    return list_schedule(block.stamp(microbatches), block.placement, cap=v_min_cap(pp))


def v_half(pp: int, microbatches: int) -> RankActions:
    """V-Half: about half of 1F1B's memory.

    Cap k = 2*floor((p+2)/2) activation sets on every rank. At F=B=W and m >= p the makespan is
    max(6m+6p-3k-1, 6m+p-1) chunk units, i.e. CM's bound (its figure 13); divide by 2 for units of
    F. The first term is the larger for p >= 3; at p=2 the cap is 1F1B's memory and 6m+1 the
    optimum.
    """
    block = v_half_block(pp)
    return list_schedule(block.stamp(microbatches), block.placement, cap=v_half_cap(pp))


def v_zb(pp: int, microbatches: int) -> RankActions:
    """V-ZB: no bubble within a rank's own span, at 1F1B's memory.

    Cap 2p activation sets on every rank. At F=B=W and m >= p the makespan is 6m+p-1 chunk units;
    divide by 2 for units of F.
    """
    block = v_zb_block(pp)
    return list_schedule(block.stamp(microbatches), block.placement, cap=2 * pp)


BLOCKS: dict[str, Callable[[int], Block]] = {
    "v-min": v_min_block,
    "v-half": v_half_block,
    "v-zb": v_zb_block,
}
