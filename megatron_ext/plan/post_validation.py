"""Costs and gains of optimizer post-validation: copies of optimizer state, a shorter iteration.

From a rank's step until it is validated, what the step has changed is there twice: main parameters
and optimizer state (and parameters, where they are the main ones). The only activation sets then
are those of the passes that have begun the next iteration, so the copies often fit beneath a peak
that is there anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from .._conflict import Conflict, first_conflict
from ..schedule.actions import Op
from ..schedule.effects import passes
from ..schedule.passes.lower import lower
from ..schedule.post_validation import add_post_validation, head_length, steady_time
from . import lengths, refusals
from .memory import MESSAGES, message_bytes
from .model import Job
from .point import Point
from .work import MOST, Work, full

FLAG = "--pp-post-validation"
RERUN = " --rerun-mode disabled"  # which it needs, and which is not Megatron's default
_AHEAD = "the next iteration has begun when Megatron comes to it; drop it"
_HOOKED = "the first passes of an iteration run before Megatron prepares for them; drop it"
_STATE = "its state is not known to be restored exactly; drop it"

CONFLICTS = (
    Conflict(
        "--rerun-mode",
        "the rerun machinery agrees over all ranks at the end of every iteration, which is "
        "what post-validation removes; add --rerun-mode disabled",
    ),
    Conflict(
        "--optimizer",
        "only the steps of adam and sgd are known to be restored exactly; use one of them",
        off=("adam", "sgd"),
    ),
    Conflict("--optimizer-cpu-offload", _STATE),
    Conflict("--use-precision-aware-optimizer", _STATE),
    Conflict("--optimizer-cuda-graph", "it is captured with Megatron's reductions in it; drop it"),
    Conflict("--use-layer-wise-distributed-optimizer", _STATE),
    Conflict("--fp8-format", "scaling factors change with every forward pass; drop it"),
    Conflict("--fp4-format", "scaling factors change with every forward pass; drop it"),
    Conflict("--num-distributed-optimizer-instances", _STATE),
    Conflict("--mtp-num-layers", "its gradients may be clipped by a norm of their own; drop it"),
    Conflict("--qk-clip", "it changes parameters behind the optimizer; drop it"),
    Conflict("--log-max-attention-logit", _AHEAD),
    Conflict("--save-activations-interval", _HOOKED),
    Conflict("--save-tokens-per-expert-interval", _HOOKED),
    Conflict("--save-dgrads-interval", _HOOKED),
    Conflict("--moe-routing-trace-path", _HOOKED),
    Conflict("--logits-save-dir", _HOOKED),
    Conflict("--logits-load-dir", _HOOKED),
    Conflict("--dsa-indexer-loss-coeff", "its loss would be logged too early; drop it"),
    Conflict(
        "--dataloader-type",
        "a loader of your own may save how far it has been read; use single or cyclic",
        off=("single", "cyclic"),
    ),
    Conflict(
        "--pp-vocab-parallel",
        "embeddings of the next iteration would need all ranks' steps; drop one of them",
    ),
)


@dataclass(frozen=True)
class PostValidationEstimate:
    """One point under ``--pp-post-validation``.

    Attributes:
        step_us: from one iteration to the next, in microseconds.
        copies: bytes of every rank's copies.
        peaks: bytes of every rank's peak.
    """

    step_us: Fraction
    copies: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def worst(self) -> int:
        """Of the rank with most bytes."""
        return max(self.peaks)


def refusal(args: Any, job: Job) -> str | None:
    """Why training refuses post-validation for this job; None: it does not.

    Args:
        args: Megatron's arguments, as attributes; those that a search decides are the job's.
    """
    names = ("optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer")
    decided = {
        **{name: getattr(job, name) for name in (*names, "num_distributed_optimizer_instances")},
        "mtp_num_layers": len(job.mtp_layers),
        "pp_vocab_parallel": job.vocab_parallel,
    }
    found = first_conflict(CONFLICTS, SimpleNamespace(**{**vars(args), **decided}))
    if found is not None:
        return f"{FLAG} does not support {found[1]}"
    options = {"pp_post_validation": True}
    return lengths.refusal(args, **options) or refusals.of_options(args, **options)


def takes_long(point: Point) -> bool:
    """True if ``with_post_validation`` needs a large part of a search's work."""
    return not Work(MOST).affords(replace(point.spec, effort=full()), _REST)


def with_post_validation(point: Point) -> PostValidationEstimate:
    """``point`` with its order made for the longest rank, and its optimizer stepping ahead."""
    work, job = point.workload, point.workload.job
    schedule = point.schedule("span")
    lowered = add_post_validation(lower(schedule))
    copies, peaks = [], []
    for usual, row in zip(point.ranks, lowered.ranks):
        own = job.params_dtype == "fp32"
        copied = usual.states.optimizer + (usual.states.parameters if own else 0)
        begun = [a for a in passes(row[: head_length(row)]) if a.op is Op.F]
        slices = point.spec.slices[0] if point.spec.slices else 1
        kept = -(-sum(work.stages[a.stage].sets.bytes_f_to_b for a in begun) // slices)
        doubt = usual.states.total + copied + kept + MESSAGES * message_bytes(job)
        copies.append(copied)
        peaks.append(max(usual.total, doubt))
    steady = steady_time(lowered)
    return PostValidationEstimate(steady, tuple(copies), tuple(peaks))


_REST = 0.6  # of a search's work, that is left behind a short one
