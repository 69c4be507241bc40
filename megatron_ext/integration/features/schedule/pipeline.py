"""The forward-backward function of a run, and the request that it is made from."""

from __future__ import annotations

from ....runtime.edges import MessageOptions
from ....runtime.wgrad import WeightGradStore
from ...feature import Run
from ...pipeline import ScheduledPipeline
from ...plans import Plans
from .choose import ScheduleRequest
from .model import describe_model


def prepare(run: Run) -> None:
    """What ``--pp-schedule`` and its options ask for, and what its features share.

    Raises:
        ConfigError: options that contradict each other.
    """
    args = run.args
    assert args.pp_schedule is not None
    run.store = WeightGradStore()
    run.request = ScheduleRequest.of(
        args.pp_schedule,
        args.pp_cost,
        args.pp_memory_cap,
        None if args.pp_offload == "off" else args.pp_offload,
    )


def pipeline_of(run: Run) -> None:
    """Make the forward-backward function of a validated run, or of a library's model."""
    if run.library:
        describe_model(run)
    args, request = run.args, run.request
    assert request is not None
    if run.store is None:
        run.store = WeightGradStore()
    placement = request.placement_on(args.pipeline_model_parallel_size, run.chunks)
    plans = Plans(run.choice, placement, run.inputs, request.barriers)
    minutes = args.distributed_timeout_minutes
    messages = MessageOptions(own=args.pp_p2p != "pipeline")
    run.pipeline = ScheduledPipeline(plans, run.store, 60.0 * minutes, messages)
