"""Orders whose microbatches are cut into slices of their sequence.

A building block is repeated for every slice, an interval apart. F of slice s needs the keys and
values of the slices before it, B their gradients from the slices behind it, so the B's of a
microbatch run in reverse, and all of them later by the most slices of a microbatch less one: then
no F stands behind its own B, for any number of slices of each. A rank holds the block's sets and
that many more of every chunk, each of the size of a slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import isqrt

from ..actions import Op
from ..engine import Rows, one_by_one
from ..search import Search
from ..tasks import Tasks, UnitCosts
from .blocks import VEES
from .building_block import Block

SHARE = 1 << 12  # a whole microbatch's F, and its size, in the costs of slices


def stamped(block: Block, tasks: Tasks) -> Rows:
    """The repeated block's order of all units.

    Args:
        block: of F, B and W, each microbatch an interval after the one before.
        tasks: on the block's placement, of any units.
    """
    late = max(Counter(tasks.microbatch).values()) - 1
    timed: list[list[tuple[int, int]]] = [[] for _ in range(tasks.placement.pp)]
    for lane, (op, stage) in enumerate(tasks.lanes):
        assert isinstance(op, Op)  # a block has no vocabulary passes
        first = block.offsets[op, stage] + (0 if op is Op.F else late * block.interval)
        for place, task in enumerate(tasks.lane_order(lane)):
            timed[tasks.rank[task]].append((first + place * block.interval, task))
    return [[task for _, task in sorted(row)] for row in timed]


def named_rows(name: str, tasks: Tasks, work: int) -> Rows:
    """The fastest order found in the memory of a V schedule's stamped block.

    Args:
        name: ``v-min``, ``v-half`` or ``v-zb``.
        tasks: of units on the V placement; durations are multiples of ``search.FINE``.
        work: tasks placed, about.
    """
    base = stamped(VEES[name].block(tasks.placement.pp), tasks)
    most = max(tasks.peaks(base))
    return _searched(tasks, [most] * tasks.placement.pp, [base], work)


def capped_rows(tasks: Tasks, caps: Sequence[int], work: int) -> Rows:
    """The fastest order found under ``caps``, of every rank, in the unit of the units' sizes.

    Raises:
        ValueError: a rank cannot hold one microbatch.
    """
    blocks = [stamped(vee.block(tasks.placement.pp), tasks) for vee in VEES.values()]
    bases = [rows for rows in blocks if all(map(int.__le__, tasks.peaks(rows), caps))]
    return _searched(tasks, caps, bases or [one_by_one(tasks)], work)


def _searched(tasks: Tasks, caps: Sequence[int], bases: list[Rows], work: int) -> Rows:
    search = Search(tasks, caps)
    search.run(bases, work)
    return search.pool[0].rows


def slice_costs(
    slices: int,
    attention: Fraction | int = 0,
    *,
    even: bool = False,
    length: Fraction | int = 1,
) -> list[UnitCosts]:
    """Costs of a microbatch's slices under causal attention, as integer shares of ``SHARE``.

    A whole microbatch of length 1 takes 1 for F, 1 + a for B and 1 - a for W: attention has no
    weights, and its backward pass takes twice as long as its forward one. A slice from x to y takes
    (1 - a)(y - x) of an F for what grows with its length, and a(y^2 - x^2) for attention to its
    prefix.

    Args:
        slices: 1 or more.
        attention: a, the share of core attention in F, from 0 to 1.
        even: cut into equal lengths; else F's take equally long.
        length: of this microbatch; 1 is that whose F takes ``SHARE``.
    """
    a, length = Fraction(attention), Fraction(length)
    ends = [length * k / slices for k in range(slices + 1)]
    if not even and a:
        whole = (1 - a) * length + a * length * length
        ends = [_cut(whole * k / slices, a) for k in range(slices + 1)]
    found = []
    for x, y in pairwise(ends):
        linear, square = (1 - a) * (y - x), a * (y * y - x * x)
        parts = (linear + square, linear + 2 * square, linear, y - x)
        found.append(UnitCosts(*(max(1, round(part * SHARE)) for part in parts)))
    return found


def _cut(time: Fraction, a: Fraction) -> Fraction:
    """Where the F of all tokens before has taken so long: (1 - a)x + a x^2."""
    root = Fraction(isqrt(int(((1 - a) ** 2 + 4 * a * time) * SHARE**4)), SHARE**2)
    return (root - (1 - a)) / (2 * a)
