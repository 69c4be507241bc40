"""Orders whose microbatches are cut into slices of their sequence.

A building block is repeated for every slice, an interval apart. F of slice s needs the keys and
values of the slices before it, B their gradients from the slices behind it, so the B's of a
microbatch run in reverse, and all of them later by the most slices of a microbatch less one: then
no F stands behind its own B, for any number of slices of each. A rank holds the block's sets and
that many more of every chunk, each of the size of a slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..actions import Op
from ..engine import Rows
from ..search import Search
from ..tasks import Tasks
from .blocks import VEES
from .building_block import Block


def stamped(block: Block, tasks: Tasks) -> Rows:
    """The repeated block's order of all units; one of the block's own passes at a time.

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
        ValueError: no stamped block fits them.
    """
    bases = [rows for rows in _stamps(tasks) if _fits(tasks, rows, caps)]
    if not bases:
        least = min(max(tasks.peaks(rows)) for rows in _stamps(tasks))
        raise ValueError(f"no order is known that holds less than {least}, got a cap of {caps}")
    return _searched(tasks, caps, bases, work)


def _stamps(tasks: Tasks) -> Iterator[Rows]:
    for vee in VEES.values():
        yield stamped(vee.block(tasks.placement.pp), tasks)


def _fits(tasks: Tasks, rows: Rows, caps: Sequence[int]) -> bool:
    return all(peak <= cap for peak, cap in zip(tasks.peaks(rows), caps))


def _searched(tasks: Tasks, caps: Sequence[int], bases: list[Rows], work: int) -> Rows:
    search = Search(tasks, caps)
    search.run(bases, work)
    return search.pool[0].rows
