"""What an answer of ``plan`` assumes."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import collectives, launches, memory, moe_times, slices, times
from ..plan.divisions import RULES
from ..plan.space import SearchSpace


def assumptions(space: SearchSpace, notes: Sequence[str], several: bool) -> list[str]:
    """All that an answer assumes, ``notes`` first; the rules for sizes if there are several."""
    job = space.job
    experts: tuple[str, ...] = ()
    if job.num_experts:
        experts = (*launches.ASSUMPTIONS, *moe_times.ASSUMPTIONS)
    if job.overlap_moe_expert_parallel_comm:
        experts += (
            "passes in pairs: the longer of their computation and their all-to-alls; what Megatron "
            "keeps between a layer's parts, beside activation sets, is not counted",
        )
    computed = [*times.ASSUMPTIONS, *experts]
    cut = slices.ASSUMPTIONS if space.slices else ()
    beside = [*cut, *collectives.ASSUMPTIONS, *([f"divisions: {RULES}"] if several else [])]
    return [*notes, *memory.ASSUMPTIONS, *computed, *beside]
