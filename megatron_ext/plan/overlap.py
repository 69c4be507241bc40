"""Whether a job's passes may run in pairs, which hide the all-to-alls of experts, and what it asks.

``--overlap-moe-expert-parallel-comm``, an option of Megatron's, with our schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._input import argument, flag_of, values_of
from .model import Job, PlanError

FLAG = "--overlap-moe-expert-parallel-comm"

ASSUMPTIONS = (
    "passes in pairs: the longer of their computation and their all-to-alls; what Megatron's plans "
    "of layers keep between a layer's parts, beside activation sets, is not counted",
)
# What Megatron refuses beside its own pairs, of flags that plan does not know.
_ALONE = (
    *("moe_shared_expert_overlap", "cuda_graph_impl", "enable_cuda_graph"),
    "external_cuda_graph",
)


def refusal(job: Job) -> str | None:
    """The first thing that passes in pairs need and this job lacks; None: it may have them."""
    modules = job.recompute_modules or ()
    needs = (
        (job.num_experts, "experts"),
        (job.expert_model_parallel_size > 1, "experts on several ranks"),
        (job.params_dtype in ("bf16", "fp16"), "16-bit parameters (--bf16 or --fp16)"),
        (len(job.mtp_layers) <= 1, "one layer for multi-token prediction at most"),
        (job.recompute_granularity != "full", "no whole layer recomputed"),
        ("moe" not in modules, "no moe in --recompute-modules"),
        (job.moe_token_dispatcher_type != "allgather", "the dispatcher alltoall or flex"),
        (not job.vocab_parallel, "a whole vocabulary (no --pp-vocab-parallel)"),
    )
    return next((f"it needs {need}" for holds, need in needs if not holds), None)


def refuse(job: Job) -> None:
    """Raise for a job that asks for what ``refusal`` names.

    Raises:
        PlanError: with the numbers or the flag, and the fix.
    """
    why = refusal(job) if job.overlap_moe_expert_parallel_comm else None
    if why is not None:
        raise PlanError(f"{FLAG}: {why}")


def is_open(job: Job) -> bool:
    """True if a search may try pairs: neither asked for nor excluded, and training allows them."""
    asked = job.overlap_moe_expert_parallel_comm is not None
    return not asked and job.moe_pipeline_chunks in (None, "off") and refusal(job) is None


def exclude_pairs(given: dict[str, Any], ignored: Sequence[str]) -> None:
    """Leave pairs out where a flag that plan ignores does not go with them.

    Args:
        given: values by Megatron's argument name; changed.
        ignored: the rest of the command line.

    Raises:
        PlanError: pairs are asked for.
    """
    beside = [name for name in values_of(ignored) if name in _ALONE]
    if beside and given.setdefault(argument(FLAG), False):
        raise PlanError(f"{FLAG} cannot be combined with {flag_of(beside[0])}; drop one of them")
