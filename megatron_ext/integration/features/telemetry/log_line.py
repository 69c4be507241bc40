"""Bubble and peak of the schedule in Megatron's own training log line, and in TensorBoard."""

from __future__ import annotations

import inspect
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ....runtime.trace import Recorder
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Step
from ...hooks import hooked
from ...targets import PRINT_LAST, TRAINING_LOG
from ...utils import gather
from .summary import Summary

# Iterations whose times are kept for the next line: enough for a mean, few enough to hold.
_KEPT = 8
_WHY = "the log line would not say bubble and peak"
_NAMES = ("pipeline bubble (%)", "peak activations (microbatches)")


class Meter:
    """Bubble and peak of the last iterations; the device is waited for only when they are read.

    Megatron itself waits for the device there, and nowhere else because of us.
    """

    def __init__(self) -> None:
        self._recent: deque[Recorder] = deque(maxlen=_KEPT)
        self._peak: float = 0
        self._group: Any = None

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


class LogLine(Callback):
    """Puts both numbers, beside what the plan promises, where Megatron logs.

    Args:
        summary: knows the plan's promise, and receives what was measured.
    """

    def __init__(self, summary: Summary) -> None:
        self.meter = Meter()
        self._summary = summary
        self._plan: Schedule | None = None
        self._text = ""

    def times(self, training: bool) -> bool:
        return training

    def end(self, step: Step) -> None:
        if step.training:
            self.meter.add(step.recorder, step.call.group)
            self._plan = step.plan

    @hooked(TRAINING_LOG, _WHY)
    def _with_measuring(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        given = inspect.signature(original).bind(*args, **kwargs).arguments
        due = given["iteration"] % get_args().log_interval == 0
        found = self.meter.read() if due or given.get("is_first_iteration") else None
        numbers = 0.0, 0.0
        if found is not None:
            numbers, self._text = self._taken(*found)
        try:
            return original(*args, **kwargs)
        finally:
            self._text = ""
            if due and found is not None:
                _write(dict(zip(_NAMES, numbers)), given["iteration"])

    def _taken(self, bubble: float, sets: float) -> tuple[tuple[float, float], str]:
        """(percent, microbatches) of what was measured, and the text for Megatron's line."""
        plan = self._plan
        assert plan is not None
        peak = sets / plan.chunks
        promised = self._summary.promise(plan)
        self._summary.measured(bubble, peak)
        return (100 * bubble, peak), (
            f" pipeline bubble: {100 * bubble:.1f} % (plan {promised.bubble_text}) | peak "
            f"activations: {peak:.4g} microbatches (plan {promised.peak_text}) |"
        )

    @hooked(PRINT_LAST, _WHY)
    def _with_text(
        self, original: Callable[..., Any], message: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._text and " iteration " in str(message) and str(message).endswith("|"):
            message, self._text = f"{message}{self._text}", ""
        return original(message, *args, **kwargs)


def _write(scalars: dict[str, float], iteration: int) -> None:
    """To TensorBoard and Weights & Biases, on the rank where Megatron has them."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in scalars.items():
        if writer:
            writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)
