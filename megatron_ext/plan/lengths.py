"""Orders for the lengths of each step's microbatches: what training refuses beside them."""

from __future__ import annotations

from typing import Any

from .._conflict import Conflict

FLAG, LENGTHS = "--pp-microbatch-costs", "lengths"
_EQUAL = "its plan is one for equal microbatches; drop one of them"
_OFFLOAD = "which sets leave is decided for all steps; drop one of them"
_COUNTED = "it counts microbatches as they come; drop it, or --pp-reorder-microbatches"
_CAPTURED = "a captured pass has one place in one order; drop it"

CONFLICTS = (
    Conflict("--pp-offload", _OFFLOAD),
    Conflict("--pp-offload-chunks", _OFFLOAD),
    Conflict("--pp-vocab-parallel", _EQUAL),
    Conflict("--pp-slice-weights", "every slice of a step's own order has its W; drop one of them",
             values=("joined",)),
    Conflict("--pp-profile-steps", "it measures equal microbatches; drop one of them"),
    Conflict("--overlap-moe-expert-parallel-comm", "pairs take equal microbatches; drop one of "
             "them"),
    Conflict("--cuda-graph-impl", _CAPTURED),
    Conflict("--enable-cuda-graph", _CAPTURED),
    Conflict("--external-cuda-graph", _CAPTURED),
    Conflict("--logits-save-dir", _COUNTED, beside="--pp-reorder-microbatches"),
    Conflict("--logits-load-dir", _COUNTED, beside="--pp-reorder-microbatches"),
)  # fmt: skip


def wanted(args: Any) -> bool:
    """True if steps are planned for their lengths, by Megatron's arguments."""
    return getattr(args, "pp_microbatch_costs", None) == LENGTHS
