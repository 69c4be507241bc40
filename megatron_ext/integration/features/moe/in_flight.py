"""Passes between their forward and their backward."""

from __future__ import annotations

from collections.abc import Sequence

from ....schedule.effects import peak_sets
from ....schedule.generators import generate
from ....schedule.schedule import Schedule


def stock_sets(pp: int, chunks: int, microbatches: int) -> list[int]:
    """Most activation sets of each rank under Megatron's own schedules."""
    if pp == 1:
        return [1]
    if chunks == 1:
        return [min(pp - rank, microbatches) for rank in range(pp)]
    try:
        return peak_sets(generate("interleaved", pp, microbatches, chunks).ranks)
    except ValueError:  # microbatches in groups that ours do not have
        warmup = [2 * (pp - rank - 1) + (chunks - 1) * pp + 1 for rank in range(pp)]
        return [min(sets, chunks * microbatches) for sets in warmup]


def of_whole(passes: Sequence[int], plan: Schedule) -> list[int]:
    """As many of whole microbatches, rounded up, as ``passes`` of its slices are at most."""
    costs, whole = plan.unit_costs()
    largest = max(unit.size for unit in costs)
    return [-(-count * largest // whole) for count in passes]
