"""Sets and bytes of a step on GPUs, as measured and as planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...._input import size_text
from ....plan.budget import Budget
from ....runtime.communicators import taken
from ....schedule.schedule import Schedule
from ...callbacks import Step
from ...feature import Run
from ...utils import gather

STEP = 2  # the first with the optimizer's states, which its first step makes


class Held(NamedTuple):
    """What one rank held at most.

    Attributes:
        sets: activation sets on the device.
        allocated: bytes of all tensors.
        communicators: bytes of ours, which are no tensors.
    """

    sets: float
    allocated: int
    communicators: int


def held(step: Step) -> list[Held]:
    """Of all ranks of the pipeline, which call this together."""
    device = step.call.device
    allocated = torch.cuda.max_memory_allocated(device)
    return gather(Held(step.recorder.peak_sets, allocated, taken(device)), step.call.group)


def planned_bytes(run: Run, plan: Schedule) -> list[int] | None:
    """Of every rank at its peak; None for a model that the planner cannot describe."""
    request = run.request
    if request is None or request.estimate is None or request.estimate.job is None:
        return None
    job, splits = request.estimate.job, request.estimate.splits
    try:
        ranks = Budget(job, 0, splits, request.profile).ranks(plan)
    except (ValueError, LookupError):  # a line of the log is no reason to end training
        return None
    return [rank.total for rank in ranks]


def text(every: Sequence[Held], plan: Schedule, planned: Sequence[int] | None) -> str:
    """The line, for the rank with most bytes."""
    at = max(range(len(every)), key=lambda rank: every[rank].allocated)
    sets, allocated, communicators = every[at]
    planned_sets = [peak * plan.chunks for peak in plan.peak_activation()]
    said = "" if planned is None else f" (plan {size_text(planned[at])})"
    return (
        f"memory after step {STEP}, pipeline rank {at}, which has most: {sets:.4g} activation "
        f"sets (plan {float(planned_sets[at]):.4g}), peak allocated {size_text(allocated)}{said}, "
        f"communicators of messages {size_text(communicators)} beside"
    )
