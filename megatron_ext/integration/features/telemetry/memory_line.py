"""One line after the second step on GPUs: sets and bytes as measured and as planned."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...._input import size_text
from ....plan.budget import Budget
from ....runtime.communicators import taken
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Step
from ...feature import Run
from ...utils import gather

logger = logging.getLogger(__name__)
_STEP = 2  # the first with the optimizer's states, which its first step makes


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


class MemoryLine(Callback):
    """Says it for the rank of rank 0's pipeline with most bytes."""

    def __init__(self, run: Run) -> None:
        self._run, self._steps = run, 0

    def end(self, step: Step) -> None:
        if not step.training:
            return
        self._steps += 1
        device = step.call.device
        if self._steps != _STEP or device.type != "cuda":
            return
        allocated = torch.cuda.max_memory_allocated(device)
        mine = Held(step.recorder.peak_sets, allocated, taken(device))
        every = gather(mine, step.call.group)
        if dist.get_rank() == 0:
            logger.info("%s", text(every, step.plan, planned_bytes(self._run, step.plan)))


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


def text(held: list[Held], plan: Schedule, planned: list[int] | None) -> str:
    """The line."""
    at = max(range(len(held)), key=lambda rank: held[rank].allocated)
    sets, allocated, communicators = held[at]
    planned_sets = [peak * plan.chunks for peak in plan.peak_activation()]
    said = "" if planned is None else f" (plan {size_text(planned[at])})"
    return (
        f"memory after step {_STEP}, pipeline rank {at}, which has most: {sets:.4g} activation "
        f"sets (plan {float(planned_sets[at]):.4g}), peak allocated {size_text(allocated)}{said}, "
        f"communicators of messages {size_text(communicators)} beside"
    )
