"""Bubble and peak of the last iterations, and sets and bytes of a step, as measured."""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...._input import size_text
from ....plan.budget import Budget
from ....runtime.communicators import taken
from ....runtime.trace import Recorder
from ....schedule.schedule import Schedule
from ...callbacks import Step
from ...feature import Run
from ...utils import gather
from .clocks import seconds_ahead

# Iterations whose times are kept for the next line: enough for a mean, few enough to hold.
_KEPT = 8


class Meter:
    """Bubble and peak of the last iterations; the device is waited for only when they are read.

    Megatron itself waits for the device there, and nowhere else because of us.
    """

    def __init__(self) -> None:
        self._recent: deque[Recorder] = deque(maxlen=_KEPT)
        self._peak: float = 0
        self._group: Any = None
        # By pipeline, of those with timed steps.
        self._ahead: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def compare_clocks(self, group: Any) -> None:
        """Once; all ranks of the pipeline call this together."""
        if group not in self._ahead:
            self._ahead[group] = seconds_ahead(group)

    def correct(self, recorder: Recorder, group: Any) -> None:
        """Let an iteration's times be those of the pipeline's first rank's clock."""
        recorder.seconds_ahead = self._ahead.get(group, 0.0)

    def add(self, recorder: Recorder, group: Any) -> None:
        """Take a training iteration, which the device may still be busy with.

        Args:
            recorder: its times; not to be reset.
        """
        self._recent.append(recorder)
        self._peak, self._group = max(self._peak, recorder.peak_sets), group

    def read(self) -> tuple[float, float] | None:
        """Bubble and peak since the last call; all ranks of the pipeline call this together.

        Returns:
            The mean bubble of the last iterations (8 at most), where an iteration's bubble is the
            mean over ranks of the share of time, from the first start of all ranks to the last
            end, in which the rank computes nothing; and the most activation sets on a rank. None
            if there was no iteration.
        """
        if not self._recent:
            return None
        mine = [recorder.extent() for recorder in self._recent], self._peak
        self._recent.clear()
        self._peak = 0
        every = gather(mine, self._group)
        bubbles = [_bubble(ranks) for ranks in zip(*(extents for extents, _ in every))]
        return statistics.fmean(bubbles), max(peak for _, peak in every)


def _bubble(ranks: Sequence[tuple[float, float, float]]) -> float:
    """Of one iteration, from every rank's (compute, first start, last end)."""
    busy, starts, ends = zip(*ranks)
    whole = max(ends) - min(starts)
    return 1 - sum(busy) / (len(ranks) * whole) if whole > 0 else 0.0


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
    if request is None or request.job is None or request.splits is None:
        return None
    try:
        ranks = Budget(request.job, 0, request.splits).ranks(plan)
    except (ValueError, LookupError):  # a line of the log is no reason to end training
        return None
    return [rank.total for rank in ranks]


def memory_text(every: Sequence[Held], plan: Schedule, planned: Sequence[int] | None) -> str:
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
