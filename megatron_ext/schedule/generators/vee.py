"""V schedules: two chunks a rank, first and last stage both on rank 0, memory balanced."""

from __future__ import annotations

from .blocks import Block, squeeze, vee_block
from .plain import Orders


def v_half_block(pp: int) -> Block:
    """V-Half's block (CM, table 9): 2 down, 1 up; the turn at the loss depends on p's parity."""
    return vee_block(pp, down=2, up=1, f_turn=1, loss_turn=4 if pp % 2 == 0 else 1, b_turn=2)


def v_half(pp: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-Half: about half of 1F1B's memory.

    Cap k = 2*floor((p+2)/2) activation sets on every rank. At F=B=W and m >= p the makespan is
    max(6m+6p-3k-1, 6m+p-1) chunk units, i.e. CM's bound (its figure 13); divide by 2 for units of
    F. The first term is the larger for p >= 3; at p=2 the cap is 1F1B's memory and 6m+1 the
    optimum.
    """
    block = v_half_block(pp)
    return squeeze(block.stamp(microbatches), block.placement, cap=2 * ((pp + 2) // 2))


def v_zb_block(pp: int) -> Block:
    """V-ZB's block (CM, section 4.2): 4 down, 2 up; turns of 1 never collide."""
    return vee_block(pp, down=4, up=2, f_turn=1, loss_turn=1, b_turn=1)


def v_zb(pp: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-ZB: no bubble within a rank's own span, at 1F1B's memory.

    Cap 2p activation sets on every rank. At F=B=W and m >= p the makespan is 6m+p-1 chunk units;
    divide by 2 for units of F.
    """
    block = v_zb_block(pp)
    return squeeze(block.stamp(microbatches), block.placement, cap=2 * pp)
