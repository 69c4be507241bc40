"""The estimate that orders are made for by default: of this model, on a device that ranks agree on.

Before the process group exists each rank estimates for its own device, so that options which do not
fit end the run early. Then all take the first rank's device, and the vocabulary that Megatron's
tokenizer has by now.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ....plan.budget import Budget, Splits
from ....plan.estimate import Estimate
from ....plan.layout import Split
from ....plan.model import Job, PlanError
from ....plan.profile import Profile
from ...arguments import MegatronArgs
from ...feature import Run
from ...model_classes import placed_models
from ...utils import device_name, device_of, gather, gather_over, unwrapped
from .choose import ScheduleRequest
from .job import counted, job_of_args, splits_of
from .rules import SIZES

logger = logging.getLogger(__name__)

# Of arguments, and of a library's configuration.
_OTHER_LAYERS = ("heterogeneous_layers_config_path", "heterogeneous_block_specs")
LENGTHS = "the lengths of microbatches vary"


def described(
    args: MegatronArgs, request: ScheduleRequest, profile: Profile | None
) -> ScheduleRequest:
    """``request`` with the model that the arguments describe: its layers, its bytes for a cap in
    bytes, what a fraction of 1F1B's peak is in bytes, and its estimated times on this rank's device
    where no others are given.

    Args:
        args: Megatron's, parsed and not yet validated.
        request: what ``--pp-schedule`` asks for.
        profile: of a former run, to plan with.

    Raises:
        ConfigError: a cap in bytes, for a model that cannot be described.
    """
    splits = splits_of(args, loop=request.loops)
    request = replace(request, profile=profile, splits=splits)
    estimate = _estimate(args, splits, device_name())
    request = replace(
        request,
        barriers=int(bool(args.pp_vocab_parallel)),
        shard=estimate,
        overlap=bool(args.overlap_moe_expert_parallel_comm),
    )
    if _unknown(request):
        request = request.estimated(estimate)
    if request.cap_bytes is None:
        return counted(args, request)
    if estimate.job is None:
        raise SIZES.broken(cap=args.pp_memory_cap, reason=estimate.reason)
    if args.rank == 0 and estimate.job.assumptions:
        assumptions = "; ".join(estimate.job.assumptions)
        logger.info("--pp-memory-cap %s: %s", args.pp_memory_cap, assumptions)
    return capped(request, estimate.job)


def capped(request: ScheduleRequest, job: Job) -> ScheduleRequest:
    """``request`` with its cap in bytes as one on the ranks of ``job``."""
    assert request.cap_bytes is not None and request.splits is not None
    budget = Budget(job, request.cap_bytes, request.splits, request.profile)
    return replace(request, cap=budget)


def _unknown(request: ScheduleRequest) -> bool:
    """Neither the user, nor a profile, nor a schedule file gives times of passes."""
    return request.costs is None and request.profile is None and request.file is None


def settle(run: Run, device: str) -> None:
    """Plan again if the first rank has another device, or the tokenizer another vocabulary
    than was assumed.

    Args:
        run: of which Megatron has validated the arguments.
        device: of the first rank of the job.

    Raises:
        ConfigError: a cap is not kept for this vocabulary.
    """
    assert run.schedule is not None
    request, planner = run.schedule, run.schedule.planner
    former = request.estimate
    assert former is not None and planner is not None
    # Megatron sets it when it builds the tokenizer, after its validation of arguments.
    new = former.with_vocabulary(getattr(run.args, "padded_vocab_size", None))
    new = replace(new, device=device)
    if new != former:
        pp, microbatches = (
            run.args.pipeline_model_parallel_size,
            planner.spec.microbatches,
        )
        run.request = run.schedule = request.estimated(new).resolve(pp, run.chunks, microbatches)
    if run.args.rank == 0:
        logger.info("%s", basis(run))
    elif (own := device_name()) != device:
        logger.warning(
            "rank %d has a %r, but the order is made for the first rank's %r",
            run.args.rank,
            own,
            device,
        )


def basis(run: Run) -> str:
    """What the run's order is made for, for the log."""
    assert run.request is not None and run.request.estimate is not None
    pp = run.args.pipeline_model_parallel_size
    stages = run.request.placement_on(pp, run.chunks).num_stages
    return f"the order is made for {run.request.estimate.text(stages)}"


def estimate_model(run: Run) -> None:
    """The estimate for a library's model, on the device of the first rank of its calls, and for the
    length that this one names. All ranks of a call do this together.
    """
    request, args = run.request, run.args
    assert request is not None
    if not _unknown(request):
        return
    models = [unwrapped(model) for model in run.models]
    layers = [len(getattr(getattr(m, "decoder", None), "layers", ())) for m in models]
    predicts = [bool(getattr(m, "mtp_process", False)) for m in models]
    own = device_name(device_of(models).index)
    every = gather((layers, predicts), run.group)
    size = args.seq_length, args.micro_batch_size
    device, (length, samples) = gather_over((own, size), run.groups)[0]
    placement = request.placement_on(len(every), run.chunks)
    at = [(placement.rank_of(s), placement.chunk_of(s)) for s in range(placement.num_stages)]
    counts = tuple(every[rank][0][chunk] for rank, chunk in at)
    depths = [stage for stage, (rank, chunk) in enumerate(at) if every[rank][1][chunk]]
    split = Split(counts, predicts=depths[0] if depths else -1)
    estimate = _estimate(args, lambda stages: split, device, models[0])
    if estimate.job is not None:
        job = estimate.job.with_(seq_length=length, micro_batch_size=samples)
        varies = LENGTHS if getattr(models[0].config, "variable_seq_lengths", False) else ""
        estimate = replace(estimate, job=job, reason=varies)
    run.request = request.estimated(estimate)
    if args.rank == 0:
        logger.info("%s", basis(run))


def _estimate(args: MegatronArgs, splits: Splits, device: str, model: Any = None) -> Estimate:
    """For the model that Megatron's arguments describe.

    Args:
        args: Megatron's, or a library's stand-in for them.
        splits: layers of every stage, for a number of stages.
        device: to estimate for.
        model: the library's, without wrappers.
    """
    try:
        if model is not None and not isinstance(model, placed_models()):
            raise PlanError(f"its class {type(model).__name__} is not modelled")
        if any(getattr(args, name, None) for name in _OTHER_LAYERS):
            raise PlanError("layers of different sizes are not modelled")
        return Estimate(job_of_args(args), splits, device)
    except PlanError as error:
        return Estimate(None, splits, reason=str(error))
