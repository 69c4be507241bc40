"""The forward-backward function of a run, and the request that it is made from."""

from __future__ import annotations

import functools

import torch.distributed as dist

from ....plan.layout import Split
from ....runtime.edges import DEFAULT, MessageOptions
from ....runtime.wgrad import WeightGradStore
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import Run
from ...offload_request import OffloadRequest
from ...pipeline import ScheduledPipeline
from ...plans import Plans
from .choose import Measured, ScheduleRequest
from .estimate import basis, estimate_model, settle
from .step_order import order_of_step


def prepare(run: Run) -> None:
    """What ``--pp-schedule`` and its options ask for, and what its features share.

    Raises:
        ConfigError: options that contradict each other.
    """
    args = run.args
    assert args.pp_schedule is not None
    _messages(args)
    run.store = WeightGradStore()
    run.request = ScheduleRequest.of(
        args.pp_schedule,
        args.pp_cost,
        args.pp_memory_cap,
        args.pp_group_size,
        OffloadRequest.of(args),
        "makespan" if args.pp_post_validation is None else "span",
        args.pp_effort,
    )


def _messages(args: MegatronArgs) -> MessageOptions:
    if args.pp_p2p is None:
        return DEFAULT
    try:
        return MessageOptions.parse(args.pp_p2p)
    except ValueError as error:
        raise ConfigError(f"--pp-p2p {args.pp_p2p}: {error}") from None


def pipeline_of(run: Run) -> None:
    """Make the forward-backward function of a validated run, or of a library's model."""
    if run.library:
        estimate_model(run)
    args, request, inputs = run.args, run.request, run.inputs
    assert request is not None
    if request.estimate is not None and not run.library:
        run.settle = functools.partial(settle, run)
        if not run.training and not dist.is_initialized():
            # The process group is made by code that we do not know; plans are compared later.
            run.notices.append(f"{basis(run)}")

    def measured() -> Measured:
        profile = inputs.profile
        costs = None if profile is None else profile.costs(Split(profile.layers))
        return Measured(inputs.link, costs, inputs.reorder and profile is not None, profile)

    if run.store is None:
        run.store = WeightGradStore()
    post_validation = args.pp_post_validation is not None
    placement = request.placement(args.pipeline_model_parallel_size, run.chunks)
    plans = Plans(
        lambda microbatches: run.choice(microbatches).plan(microbatches, measured()),
        lambda microbatches: run.choice(microbatches).later(microbatches, measured()),
        lambda loads: order_of_step(run.choice(len(loads.order)), loads),
        placement,
        inputs,
        post_validation,
        request.barriers,
    )
    minutes = args.distributed_timeout_minutes
    run.pipeline = ScheduledPipeline(plans, run.store, 60.0 * minutes, _messages(args))
