"""Interleaved zero bubble, for any number of microbatches.

Microbatches go through the chunks in groups, which may differ in size: a group's forwards of chunk
0, then of chunk 1, and so on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..actions import Action, Op, RankActions

_Unit = tuple[int, int]  # (chunk, microbatch) of a forward; backwards count chunks from the last


def interleaved_zb(pp: int, microbatches: int, chunks: int) -> RankActions:
    """gis with W delayed, as in zb-h1, so that every rank holds 1F1B's p*v activation sets.

    At F=B=W, without hops and for m >= 2p: makespan m(F+B+W) + (p-1)F/v if p divides m; for other
    m the list schedule of this order reaches it.
    """
    units = _units(_groups(pp, microbatches), chunks)
    full = pp * (chunks - 1) + pp - 1
    return [_row(rank, pp, chunks, units, full - rank, full) for rank in range(pp)]


def interleaved_zb_small(pp: int, microbatches: int, chunks: int) -> RankActions:
    """The same memory, with smaller groups after the first.

    Groups of about 3p/4 need fewer sets for what is on its way, so a rank keeps W's in reserve,
    which fill the cool-down where F takes longer than W. Worse where hops leave no time to go
    around in a group that small. For 3p microbatches or more: for fewer there is nothing to gain.
    """
    rest = microbatches - pp
    count = max(1, round(4 * rest / (3 * pp)))
    sizes = [pp, *(rest // count + (i < rest % count) for i in range(count))]
    units = _units(sizes, chunks)
    ahead = [size * (chunks - 1) for size in sizes for _ in range(size * chunks)]
    ranks: RankActions = []
    for rank in range(pp):
        row: list[Action] = []
        pending: deque[Action] = deque()
        done = 0
        for x, (chunk, microbatch) in enumerate(units):
            if x - done + len(pending) >= pp * chunks:
                row.append(pending.popleft())
            row.append(Action(Op.F, chunk * pp + rank, microbatch))
            last = x == len(units) - 1
            while done < len(units) and (last or done + ahead[done] + pp - 1 - rank <= x):
                chunk, microbatch = units[done]
                stage = (chunks - 1 - chunk) * pp + rank
                row.append(Action(Op.B, stage, microbatch))
                pending.append(Action(Op.W, stage, microbatch))
                done += 1
        ranks.append(row + list(pending))
    return ranks


def _groups(pp: int, microbatches: int) -> list[int]:
    """Sizes that sum to m, all p except at the end. In the steady state groups of (2p-1)/3 are
    enough to hide the way around the ring; in the cool-down, where W fills, half of p."""
    whole, rest = divmod(microbatches, pp)
    if not rest:
        return [pp] * whole
    if not whole or 2 * rest >= pp:
        return [pp] * whole + [rest]
    tail = pp + rest
    if whole == 1:
        return [pp, rest]  # the first group has to be whole: nothing hides the ring before it
    inner = max(-(-(2 * pp - 1) // 3), -(-tail // 2))
    return [pp] * (whole - 1) + [inner, tail - inner]


def _units(groups: Sequence[int], chunks: int) -> list[_Unit]:
    units, first = [], 0
    for size in groups:
        units += [(c, j) for c in range(chunks) for j in range(first, first + size)]
        first += size
    return units


def _row(
    rank: int, pp: int, chunks: int, units: Sequence[_Unit], b_late: int, w_late: int
) -> list[Action]:
    """F of the x-th unit, then B of the one ``b_late`` before it, then W ``w_late`` before."""
    backward = [((chunks - 1 - c) * pp + rank, j) for c, j in units]
    row = []
    for x in range(len(units) + w_late):
        if x < len(units):
            chunk, microbatch = units[x]
            row.append(Action(Op.F, chunk * pp + rank, microbatch))
        if 0 <= x - b_late < len(units):
            row.append(Action(Op.B, *backward[x - b_late]))
        if x >= w_late:
            row.append(Action(Op.W, *backward[x - w_late]))
    return row
