"""The forward-backward function of a run, and the request that it is made from."""

from __future__ import annotations

from ....runtime.edges import DEFAULT, MessageOptions
from ....runtime.wgrad import WeightGradStore
from ...arguments import MegatronArgs
from ...errors import named_errors
from ...feature import Run
from ...offload_request import OffloadRequest
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
    _messages(args)
    run.store = WeightGradStore()
    run.request = ScheduleRequest.of(
        args.pp_schedule,
        args.pp_cost,
        args.pp_memory_cap,
        args.pp_group_size,
        OffloadRequest.of(args),
    )


def _messages(args: MegatronArgs) -> MessageOptions:
    with named_errors(f"--pp-p2p {args.pp_p2p}"):
        return DEFAULT if args.pp_p2p is None else MessageOptions.parse(args.pp_p2p)


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
    run.pipeline = ScheduledPipeline(plans, run.store, 60.0 * minutes, _messages(args))
