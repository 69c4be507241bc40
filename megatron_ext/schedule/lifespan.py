"""Lifespans of a building block: its memory, and what its repetition gives.

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, below CM), sections 2 and 3.
Times are passes of one chunk, all of them equally long (a BW two).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .actions import Op, RankActions
from .costs import Durations
from .generators.building_block import Block
from .search import Search
from .tasks import Tasks


@dataclass(frozen=True)
class Lifespans:
    """A block and its schedule for one number of microbatches.

    Attributes:
        lifespan: per stage, from the start of F to the end of W (or BW).
        wait: per stage, the part of it in which only the W is still to come.
        bound: per rank, most sets by lifespan: the sum over its stages of ceil(lifespan /
            interval), each at most the number of microbatches (CM, equation 1).
        peak: per rank, the most sets in the order of the repeated block.
        squeezed, reordered: bubble of that order, and of the list schedule of it that keeps
            ``peak``.
        balance: ``balanced``, ``by late W`` (waiting W's alone make the ranks even),
            ``unbalanced``, or ``grows`` (lifespans grow with the number of microbatches).
        why: one line: why the block is memory-efficient, or why it is not.
    """

    block: Block
    microbatches: int
    lifespan: list[int]
    wait: list[int]
    bound: list[int]
    peak: list[int]
    squeezed: Fraction
    reordered: Fraction
    balance: str
    why: str


def lifespans(block: Block, microbatches: int, *, grows: bool = False) -> Lifespans:
    """The numbers of ``block``.

    Args:
        block: executable as it is (``Block.validate``).
        microbatches: of one iteration.
        grows: the block's lifespans grow with them.
    """
    placement, at = block.placement, block.offsets
    stages = range(placement.num_stages)
    life = [end - begin for begin, end in map(block.lifespan, stages)]
    wait = [at[Op.W, s] - at[Op.B, s] - 1 if (Op.W, s) in at else 0 for s in stages]
    work = 3 * placement.chunks * microbatches
    search = _reordered(block, block.table(microbatches))
    rows = block.rows(search.tasks)
    squeezed, best = (
        1 - Fraction(work, time or 1) for time in (search.time_of(rows), search.pool[0].time)
    )
    bound = [sum(min(block.peak([s]), microbatches) for s in row) for row in placement.stages]
    balance, why = ("grows", _GROWS) if grows else _balance(block, life, wait)
    peaks = search.tasks.peaks(rows)
    return Lifespans(
        block, microbatches, life, wait, bound, peaks, squeezed, best, balance, why
    )  # fmt: skip


_GROWS = "not bounded: a stage lives until the last F, so the memory grows with the microbatches"


def _balance(block: Block, life: list[int], wait: list[int]) -> tuple[str, str]:
    """How even the memory is over the ranks, by the mean of what each holds in steady state."""
    rows, chunks = block.placement.stages, block.placement.chunks
    interval = chunks * Fraction(block.interval, block.group)
    held = [sum(life[s] for s in row) / interval for row in rows]
    unwaited = [sum(life[s] - wait[s] for s in row) / interval for row in rows]
    last = len(rows) - 1
    live = [" + ".join(str(life[s]) for s in row) for row in (rows[0], rows[-1])]
    stages = f"stages of rank 0 live {live[0]}, of rank {last} {live[1]}"
    # Without waiting W's Megatron's placement makes it p-1 sets at least; that of the V's turns and
    # gaps before W is one at most.
    uneven = Fraction(last, 2 * chunks)
    if max(held) - min(held) > uneven:
        mean = sum(held, Fraction(0)) / len(held)
        return "unbalanced", (
            f"not efficient: {stages}; rank {held.index(max(held))} holds "
            f"{float(max(held)):.3g} microbatches, the mean rank {float(mean):.3g}"
        )
    if max(unwaited) - min(unwaited) > uneven:
        waits = [sum(wait[s] for s in row) for row in (rows[0], rows[-1])]
        return "by late W", (
            f"not efficient: even only because W waits, {waits[0]} on rank 0, {waits[1]} on rank "
            f"{last}; without that ranks would hold {float(max(unwaited)):.3g} to "
            f"{float(min(unwaited)):.3g} microbatches"
        )
    return "balanced", (
        f"efficient: {stages}; every rank holds about {float(max(held)):.3g} microbatches"
    )


def reordered(block: Block, microbatches: int, durations: Durations) -> RankActions:
    """The fastest of the repeated block's order and its list schedules, with no more memory."""
    search = _reordered(block, block.table(microbatches, durations))
    return search.tasks.actions(search.pool[0].rows)


def _reordered(block: Block, tasks: Tasks) -> Search:
    rows = block.rows(tasks)
    search = Search(tasks, tasks.peaks(rows))
    search.start(rows, [Fraction(1), Fraction(0)])
    return search
