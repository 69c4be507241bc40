"""Whether a job's passes may run in pairs, which hide the all-to-alls of experts, and what it asks.

``--overlap-moe-expert-parallel-comm``, an option of Megatron's, with our schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .._conflict import Conflict, argument, first_conflict, values_of
from .model import Job, PlanError

FLAG = "--overlap-moe-expert-parallel-comm"

ASSUMPTIONS = (
    "passes in pairs: the longer of their computation and their all-to-alls; what Megatron's plans "
    "of layers keep between a layer's parts, beside activation sets, is not counted",
)

_WHOLE = "passes in pairs run layer by layer, and recompute no whole layer; drop it"
_GRAPHS = "graphs are captured for single passes; drop it"

CONFLICTS = (
    Conflict(
        "--pp-offload",
        "Megatron's plans of layers keep tensors between a layer's parts, beside those that "
        "autograd saves and offload could move; drop it, or use --pp-memory-cap",
    ),
    Conflict(
        "--pp-vocab-parallel",
        "the vocabulary's passes take the output layer out of the last stage, which a pair "
        "needs whole; drop it",
    ),
    Conflict("--recompute-granularity", _WHOLE, values=("full",)),
    Conflict("--recompute-method", _WHOLE),
    Conflict("--recompute-num-layers", _WHOLE),
    Conflict(
        "--recompute-modules",
        "the all-to-all would run again in the backward pass, unhidden; take it out",
        values=("moe",),
    ),
    Conflict(
        "--moe-shared-expert-overlap",
        "shared experts run on a stream of their own beside the all-to-all, which the pair "
        "hides already; drop it",
    ),
    Conflict(
        "--moe-token-dispatcher-type",
        "its exchange is no all-to-all that could be started by itself; use alltoall or flex",
        values=("allgather",),
    ),
    Conflict("--cuda-graph-impl", _GRAPHS),
    Conflict("--enable-cuda-graph", _GRAPHS),
    Conflict("--external-cuda-graph", _GRAPHS),
)


def unmet(experts: int | None, ranks: int, depths: int, half: bool) -> tuple[str, str, str] | None:
    """What Megatron's own pairs need, what this model has in its place, and the fix; None: all is
    there.

    Args:
        experts: of a layer.
        ranks: of expert parallelism.
        depths: of multi-token prediction.
        half: parameters have 16 bits.
    """
    spread, one = f"--expert-model-parallel-size is {ranks}", f"--mtp-num-layers is {depths}"
    needs = (
        (bool(experts), ("experts", f"--num-experts is {experts}", "drop it")),
        (ranks > 1, ("experts on several ranks", spread, "raise it, or drop the pairs")),
        (half, ("16-bit parameters", "they have 32", "add --bf16 or --fp16")),
        (depths <= 1, ("one layer for multi-token prediction at most", one, "give 1")),
    )
    return next((need for holds, need in needs if not holds), None)


def refusal(job: Job) -> str | None:
    """Why training refuses passes in pairs for this job; None: it does not."""
    need = unmet(
        job.num_experts,
        job.expert_model_parallel_size,
        len(job.mtp_layers),
        job.params_dtype in ("bf16", "fp16"),
    )
    if need is not None:
        return "it needs {}, but {}; {}".format(*need)
    args = SimpleNamespace(
        pp_vocab_parallel=job.vocab_parallel,
        recompute_granularity=job.recompute_granularity,
        recompute_method=job.recompute_method,
        recompute_modules=job.recompute_modules,
        moe_token_dispatcher_type=job.moe_token_dispatcher_type,
    )
    return _conflict(args)


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
    why = _conflict(SimpleNamespace(**values_of(ignored)))
    if why is None:
        return
    if given.setdefault(argument(FLAG), False):
        raise PlanError(f"{FLAG} {why}")


def _conflict(args: Any) -> str | None:
    found = first_conflict(CONFLICTS, args)
    return None if found is None else f"cannot be combined with {found[1]}"
