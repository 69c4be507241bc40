"""``auto`` in the form of ``generate``, for tests that treat it as one more name."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from megatron_ext.schedule import AUTO, Costs, Schedule, ScheduleSpec, generate, select
from megatron_ext.schedule.memory_cap import ShareCap

_EQUAL = Costs()


def made(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs = _EQUAL,
    *,
    memory_cap: int | None = None,
    **options: Any,
) -> Schedule:
    """As ``generate``; a cap of ``auto`` counts in sets of one of ``chunks`` (default 2) chunks."""
    if name != AUTO:
        return generate(name, pp, microbatches, chunks, costs, memory_cap=memory_cap, **options)
    share = None if memory_cap is None else Fraction(memory_cap, pp * (chunks or 2))
    cap = None if share is None else ShareCap(share)
    return select(ScheduleSpec(AUTO, pp, microbatches, chunks, costs, cap, **options)).schedule
