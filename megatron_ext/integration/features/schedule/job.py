"""The planner's view of a run: Megatron's arguments as a job, layers of every stage."""

from __future__ import annotations

import logging
from typing import Any

from ...._input import argument, attribute
from ....plan.budget import Splits
from ....plan.flags import FLAGS, job_of, not_modelled
from ....plan.layout import Split, read_layout
from ....plan.model import Job, PlanError
from ...arguments import MegatronArgs
from ...layout import layer_counts

logger = logging.getLogger(__name__)


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
    if getattr(args, "heterogeneous_block_specs", None):  # of a library's configuration
        raise PlanError("layers of different sizes are not modelled")
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


def splits_of(args: MegatronArgs, *, loop: bool = False) -> Splits:
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


def log_equal(args: MegatronArgs, why: PlanError) -> None:
    """Say that the model is not described, and why."""
    if args.rank == 0:
        logger.info("the order is made for equal costs: %s", why)
