"""What an answer of ``plan`` assumes."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import collectives, launches, memory, moe_times, slices, times
from ..plan.divisions import RULES
from ..plan.space import SearchSpace
from .plan_options import pair_assumptions


def assumptions(space: SearchSpace, notes: Sequence[str], several: bool) -> list[str]:
    """All that an answer assumes, ``notes`` first; the rules for sizes if there are several."""
    measured = [] if not space.profiles else ["times and rates: measured, from the profile"]
    job = space.job
    experts: tuple[str, ...] = ()
    if job.num_experts:
        experts = (*launches.ASSUMPTIONS, *moe_times.ASSUMPTIONS)
    experts += pair_assumptions(job)
    computed = [*times.ASSUMPTIONS, *experts]
    cut = slices.ASSUMPTIONS if space.slices else ()
    beside = [*cut, *collectives.ASSUMPTIONS, *([f"divisions: {RULES}"] if several else [])]
    return [*notes, *memory.ASSUMPTIONS, *measured, *computed, *beside]
