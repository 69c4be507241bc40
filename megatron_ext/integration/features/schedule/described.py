"""A request with what the arguments say of the model: its job, its layers, its bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction

from ....plan.budget import Budget
from ....plan.memory import growth
from ....plan.model import Job, PlanError
from ....schedule import AUTO, Placement
from ....schedule.memory_cap import ShareCap, number_text
from ...arguments import MegatronArgs
from ...errors import ConfigError
from .choose import ScheduleRequest
from .job import job_of_args, log_equal, splits_of

logger = logging.getLogger(__name__)

_SMALL = Fraction(21, 20)


def described(args: MegatronArgs, request: ScheduleRequest) -> ScheduleRequest:
    """``request`` with the model that the arguments describe: its job, its layers, its bytes for a
    cap in bytes.

    Args:
        args: Megatron's, parsed and not yet validated.
        request: what ``--pp-schedule`` asks for.

    Raises:
        ConfigError: a cap in bytes, for a model that cannot be described.
    """
    request = replace(
        request,
        splits=splits_of(args, loop=request.loops),
        barriers=int(bool(args.pp_vocab_parallel)),
        overlap=bool(args.overlap_moe_expert_parallel_comm),
    )
    try:
        job = job_of_args(args)
    except PlanError as error:
        if request.cap_bytes is not None:
            raise ConfigError(
                f"--pp-memory-cap {args.pp_memory_cap} in bytes needs the model's sizes, but "
                f"{error}; give a fraction of 1F1B's peak"
            ) from None
        log_equal(args, error)
        return request
    request = replace(request, job=job)
    if request.cap_bytes is None:
        return counted(args, request)
    if args.rank == 0 and job.assumptions:
        logger.info("--pp-memory-cap %s: %s", args.pp_memory_cap, "; ".join(job.assumptions))
    return capped(request, job)


def capped(request: ScheduleRequest, job: Job) -> ScheduleRequest:
    """``request`` with its cap in bytes as one on the ranks of ``job``."""
    assert request.cap_bytes is not None and request.splits is not None
    budget = Budget(job, request.cap_bytes, request.splits)
    return replace(request, cap=budget)


def counted(args: MegatronArgs, request: ScheduleRequest) -> ScheduleRequest:
    """``request`` with a fraction of 1F1B's peak as a fraction of its bytes.

    As of its sets where they do not grow between B and W, and where the model is not modelled.
    """
    auto = request.name == AUTO
    if request.cap_bytes is not None or not (auto or request.splits_backward):
        return request
    assert request.splits is not None
    try:
        budget = Budget(job_of_args(args), 0, request.splits)
        most = growth(budget.stages(Placement.loop(args.pipeline_model_parallel_size, 1)))
    except (ConfigError, PlanError):
        return request
    if most <= _SMALL:
        return request
    if args.rank == 0:
        logger.info(
            "--pp-schedule %s: an activation set takes up to %s times as many bytes "
            "between B and W as before B (inputs and output gradients of linear layers); "
            "a --pp-memory-cap counts them, the memory of a schedule's name does not",
            request.name,
            number_text(most),
        )
    if auto or request.cap is not None:
        cap = request.cap or ShareCap(Fraction(1))
        assert isinstance(cap, ShareCap)
        request = replace(request, cap=replace(cap, growth=most))
    return request
