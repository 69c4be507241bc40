"""Passes that Megatron's own schedules have between their forward and their backward."""

from __future__ import annotations

from ....schedule.effects import peak_sets
from ....schedule.generators import generate


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
