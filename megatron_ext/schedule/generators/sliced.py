"""Orders whose microbatches are cut into slices of their sequence, or differ in their costs.

A building block is repeated for every unit. F of a slice needs the keys and values of the slices
before it, B their gradients from the slices behind it, so the B's of a microbatch run in reverse,
and all of them later by as long as its last slice begins behind its first: then no F stands behind
its own B, for any number of slices of each. A rank holds the block's sets and that many more of
every chunk, each of the size of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from ..actions import AnyAction, Op
from ..engine import Rows, list_schedule, one_by_one
from ..memory_cap import NEAR
from ..schedule import Schedule
from ..search import FINE, GAPS, Search
from ..tasks import Tasks
from ..units import Unit, named
from .blocks import PERIODIC, VEES, grouped_block, named_block
from .building_block import Block
from .request import THOROUGH

if TYPE_CHECKING:
    from .registry import Generator


def sliced(
    asked: Schedule,
    generator: Generator,
    group_size: int | None,
    memory_cap: int | Fraction | None,
    effort: float,
) -> list[list[AnyAction]]:
    """The order of a named schedule for its units.

    Args:
        asked: name, placement, microbatches, slices and costs.
        generator, group_size, memory_cap, effort: as ``generate``.

    Raises:
        ValueError: the schedule has no such order, or the cap holds no microbatch.
    """
    block = _block(asked, group_size)
    tasks, whole = tasks_of(asked, block)
    base = block.rows(tasks)
    if not generator.fixed:
        work = int(THOROUGH * 3 * effort)
        if memory_cap is None:
            caps = [max(tasks.peaks(base))] * asked.pp
            base = searched(tasks, caps, [base], work)
        else:
            caps = [int(memory_cap * whole + NEAR * whole)] * asked.pp
            base = planned(tasks, caps, work)
    ranks = tasks.actions(base)
    if asked.joined:
        firsts = {unit for unit in asked.units if not (isinstance(unit, Unit) and unit.slice)}
        ranks = [[a for a in row if a.op is not Op.W or a.microbatch in firsts] for row in ranks]
    return named(ranks, asked.units)


def tasks_of(asked: Schedule, block: Block) -> tuple[Tasks, int]:
    """The table of all passes, for searches, and the size of a whole microbatch's set in it."""
    costs, whole = asked.unit_costs()
    if block.fused and asked.joined:
        raise ValueError(
            f"{asked.name} has no W passes of their own to join; leave it out, or use zb-h1 or v-zb"
        )
    durations = asked.costs.durations(asked.placement)
    fine = durations.times(FINE, durations.scale)
    fine = fine._replace(hop=fine.hop * whole)
    given = iter(costs)
    counts = asked.slices or (1,) * asked.microbatches
    rows = [[next(given) for _ in range(count)] for count in counts]
    return Tasks(asked.placement, fine, rows, fused=block.fused), whole


def _block(asked: Schedule, group_size: int | None) -> Block:
    name = asked.name
    if name == "v-cap":
        return VEES["v-zb"].block(asked.pp)
    if name not in PERIODIC:
        raise ValueError(
            f"{name} runs passes in pairs, which slices of a sequence and costs of single "
            "microbatches do not have; use v-zb"
        )
    if group_size is not None:
        return grouped_block(asked.pp, asked.chunks, group_size, "next")
    return named_block(name, asked.pp, asked.chunks)


def vees(tasks: Tasks) -> list[Rows]:
    """Every V block's order of all units, on the V placement."""
    return [vee.block(tasks.placement.pp).rows(tasks) for vee in VEES.values()]


def planned(
    tasks: Tasks,
    caps: Sequence[int],
    work: int,
) -> Rows:
    """The fastest order found for units of any lengths, on the V placement.

    Args:
        tasks: durations are multiples of ``search.FINE``.
        caps: of every rank, in the unit of the units' sizes.
        work: as ``searched``; 0 is fast enough to plan every step of a training.

    Raises:
        ValueError: a rank cannot hold one microbatch.
    """
    stamps = vees(tasks)
    fit = [rows for rows in stamps if tasks.fits(rows, caps)]
    single = one_by_one(tasks)
    bases = list(fit) or [single]
    if not work:  # a block that takes more memory still says what comes first
        bases += [
            list_schedule(tasks, single, caps, gap=GAPS[0], order=rows)
            for rows in stamps
            if rows not in fit
        ]
    return searched(tasks, caps, bases, work)


def searched(tasks: Tasks, caps: Sequence[int], bases: Sequence[Rows], work: int) -> Rows:
    """The fastest order found under ``caps`` by placing ``work`` tasks, about; 0: only the list
    schedules of ``bases``."""
    search = Search(tasks, caps)
    if work:
        search.run(bases, work)
    else:
        for base in bases:
            search.start(base, GAPS[:2])
    return search.pool[0].rows
