"""Fixed orders on a plain or looped pipeline: 1F1B, interleaved 1F1B, ZB-H1."""

from __future__ import annotations

from ..actions import Action, Op, RankActions


def one_f_one_b(pp: int, microbatches: int, chunks: int = 1) -> RankActions:
    """1F1B: rank r runs pp-1-r forwards ahead, then alternates.

    At F=B=W: makespan 3(m+p-1) in units of F, peak min(m, p-r) microbatches on rank r.
    """
    ranks: RankActions = []
    for rank in range(pp):
        ahead = pp - 1 - rank
        row = []
        for x in range(microbatches + ahead):
            if x < microbatches:
                row.append(Action(Op.F, rank, x))
            if x >= ahead:
                row.append(Action(Op.BW, rank, x - ahead))
        ranks.append(row)
    return ranks


def interleaved(pp: int, microbatches: int, chunks: int) -> RankActions:
    """Interleaved 1F1B in Megatron's order (groups of pp microbatches, chunk by chunk).

    Megatron wants m to be a multiple of p. Other m take the order for the next multiple without
    the surplus microbatches: dropping all passes of a microbatch leaves a valid order valid.
    At F=B=W and p | m: makespan 3m + 3(p-1)/v in units of F; for m >= 2p the peak is
    p + (p-1)/v microbatches on rank 0 (CM, section 1: 1 + (p-1)/(pv) of 1F1B's).
    """
    groups = -(-microbatches // pp)
    total = groups * pp * chunks
    ranks: RankActions = []
    for rank in range(pp):
        ahead = min(total, 2 * (pp - 1 - rank) + (chunks - 1) * pp)
        row = []
        for x in range(total + ahead):
            if x < total:
                chunk, microbatch = _unit(x, pp, chunks)
                if microbatch < microbatches:
                    row.append(Action(Op.F, chunk * pp + rank, microbatch))
            if x >= ahead:
                chunk, microbatch = _unit(x - ahead, pp, chunks)
                if microbatch < microbatches:
                    row.append(Action(Op.BW, (chunks - 1 - chunk) * pp + rank, microbatch))
        ranks.append(row)
    return ranks


def _unit(x: int, pp: int, chunks: int) -> tuple[int, int]:
    """(chunk, microbatch) of the x-th forward; backwards count the chunks from the last."""
    group, within = divmod(x, pp * chunks)
    return within // pp, group * pp + within % pp


def zb_h1(pp: int, microbatches: int, chunks: int = 1) -> RankActions:
    """ZB-H1: 1F1B with W delayed so that every rank keeps p microbatches (ZB, section 2.3).

    Steady state of rank r: F_x, B_{x-(p-1-r)}, W_{x-(p-1)}. At F=B=W: makespan 3m+p-1 in units
    of F for m >= p, peak min(m, p) microbatches.
    """
    ranks: RankActions = []
    for rank in range(pp):
        ahead = pp - 1 - rank
        row = []
        for x in range(microbatches + pp - 1):
            if x < microbatches:
                row.append(Action(Op.F, rank, x))
            if 0 <= x - ahead < microbatches:
                row.append(Action(Op.B, rank, x - ahead))
            if x >= pp - 1:
                row.append(Action(Op.W, rank, x - (pp - 1)))
        ranks.append(row)
    return ranks


def zb_h2(pp: int, microbatches: int, chunks: int = 1) -> RankActions:
    """ZB-H2: no bubble within a rank's own span, for nearly twice 1F1B's memory (ZB, section 2.4).

    Steady state of rank r: F_x, B_{x-2(p-1-r)}, W_{x-2(p-1)}. At F=B=W and m >= 2p-1: makespan
    3m+p-1 in units of F, every rank's own span 3m, peak min(m, 2p-1) microbatches.
    """
    ranks: RankActions = []
    for rank in range(pp):
        ahead, late = 2 * (pp - 1 - rank), 2 * (pp - 1)
        row = []
        for x in range(microbatches + late):
            if x < microbatches:
                row.append(Action(Op.F, rank, x))
            if 0 <= x - ahead < microbatches:
                row.append(Action(Op.B, rank, x - ahead))
            if x >= late:
                row.append(Action(Op.W, rank, x - late))
        ranks.append(row)
    return ranks
