"""Orders for the lengths of each step's microbatches."""

from __future__ import annotations

from typing import Any

FLAG, LENGTHS = "--pp-microbatch-costs", "lengths"


def wanted(args: Any) -> bool:
    """True if steps are planned for their lengths, by Megatron's arguments."""
    return getattr(args, "pp_microbatch_costs", None) == LENGTHS
