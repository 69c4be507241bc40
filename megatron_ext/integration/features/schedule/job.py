"""The planner's view of a run: Megatron's parsed arguments as a job, layers of every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...._input import attribute
from ....plan.flags import FLAGS, NOT_MODELLED, job_of
from ....plan.layout import Split, read_layout
from ....plan.model import Job, PlanError
from ...arguments import MegatronArgs
from ...layout import layer_counts


def job_of_args(args: MegatronArgs) -> Job:
    """What ``megatron-ext plan --from-args`` makes of the same command line.

    Args:
        args: Megatron's, parsed and not yet validated; or what a library's model has for them.

    Raises:
        PlanError: the model is not one that is modelled, or its numbers contradict each other.
    """
    for flag, why in NOT_MODELLED.items():
        if getattr(args, attribute(flag), None):
            raise PlanError(f"{flag} {why}, which is not modelled")
    given: dict[str, Any] = {}
    for flag, kind in FLAGS.items():
        name = attribute(flag)
        value = getattr(args, _OTHER_NAMES.get(name, name), None)
        value = getattr(value, "name", value)  # of an enumeration
        if value is not None and value is not False:
            given[name] = str(value) if kind is str else value
    given["disable_bias_linear"] = not args.add_bias_linear
    if not given.get("group_query_attention"):
        given.pop("num_query_groups", None)
    return job_of(given)


# Of flags whose value Megatron's parsed arguments have under another name.
_OTHER_NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}


def splits_of(args: MegatronArgs) -> Callable[[int], Split]:
    """How Megatron's flags divide the layers over a number of stages, in model order."""

    def split(stages: int) -> Split:
        counts = tuple(layer_counts(args, stages))
        layout = getattr(args, "pipeline_model_parallel_layout", None)
        layout = getattr(layout, "input_data", layout)  # Megatron's validation wraps it
        if not isinstance(layout, str) or "m" not in layout:
            return Split(counts)
        return Split(counts, predicts=read_layout(layout, sum(counts)).predicts)

    return split
