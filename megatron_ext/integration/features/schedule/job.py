"""The planner's view of a run: Megatron's parsed arguments as a job, layers of every stage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...._conflict import argument, attribute
from ....plan.budget import Budget
from ....plan.flags import FLAGS, job_of, not_modelled
from ....plan.layout import Split, read_layout
from ....plan.memory import growth
from ....plan.model import Job, PlanError
from ....schedule import AUTO, Placement
from ....schedule.memory_cap import ShareCap, number_text
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...layout import layer_counts
from .choose import ScheduleRequest

logger = logging.getLogger(__name__)

_SMALL = Fraction(21, 20)


def job_of_args(args: MegatronArgs) -> Job:
    """What ``megatron-ext plan --from-args`` makes of the same command line.

    Args:
        args: Megatron's, parsed and not yet validated; or what a library's model has for them.

    Raises:
        PlanError: the model is not one that is modelled, or its numbers contradict each other.
    """
    why = not_modelled(lambda name: getattr(args, name, None))
    if why is not None:
        raise PlanError(why)
    given: dict[str, Any] = {}
    for flag, kind in FLAGS.items():
        name = attribute(flag)
        value = getattr(args, argument(flag), None)
        value = getattr(value, "name", value)  # of an enumeration
        if value is not None and value is not False:
            given[name] = str(value) if kind is str else value
    given["disable_bias_linear"] = not args.add_bias_linear
    given["no_gradient_accumulation_fusion"] = args.gradient_accumulation_fusion is False
    if not given.get("group_query_attention"):
        given.pop("num_query_groups", None)
    return job_of(given)


def splits_of(args: MegatronArgs, *, loop: bool = False) -> Callable[[int], Split]:
    """How Megatron's flags divide the layers over a number of stages, in model order.

    Args:
        loop: these are placed as Megatron does, several on a rank.
    """

    def split(stages: int) -> Split:
        counts = tuple(layer_counts(args, stages, loop=loop))
        layout = getattr(args, "pipeline_model_parallel_layout", None)
        layout = getattr(layout, "input_data", layout)  # Megatron's validation wraps it
        if not isinstance(layout, str) or "m" not in layout:
            return Split(counts)
        return Split(counts, predicts=read_layout(layout, sum(counts)).predicts)

    return split


def counted(args: MegatronArgs, request: ScheduleRequest) -> ScheduleRequest:
    """``request`` with a fraction of 1F1B's peak as a fraction of its bytes.

    As of its sets where they do not grow between B and W, and where the model is not modelled.
    """
    auto = request.name == AUTO
    if request.cap_bytes is not None or not (auto or request.splits_backward):
        return request
    assert request.splits is not None
    try:
        budget = Budget(job_of_args(args), 0, request.splits, request.profile)
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
