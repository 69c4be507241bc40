"""Begins a training iteration before Megatron asks for it, and can drop it."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from ....runtime.edges import MessageOptions
from ....runtime.post_validation import StepOperations, StepValidator
from ....schedule.post_validation import describe_gain, head_length
from ....schedule.schedule import Schedule
from ...callbacks import Step
from ...feature import Feature
from ...pipeline import ScheduledPipeline
from ...runner import Call
from ...utils import Wrappers
from .rewind import Replay, Rewind

logger = logging.getLogger(__name__)


class Head(Feature):
    """Begins the next training iteration as the last one was."""

    def _set_up(self, pipeline: ScheduledPipeline) -> None:
        self._pipeline = pipeline
        self._replays = Wrappers(Replay)
        self._last: Call | None = None
        self._begun: tuple[Step, Rewind] | None = None

    # --- events ---

    def data_iterators(self, iterators: list[Any], training: bool) -> list[Any]:
        return self._replays.over(iterators) if training else iterators

    def planned(self, plan: Schedule) -> None:
        if dist.get_rank() == 0:
            logger.info("%s", describe_gain(plan))

    def resume(self, call: Call) -> Step | None:
        if self._begun is None:
            return None
        step, rewind = self._begun
        if not step.call.is_as(call):
            self.drop()
            return None
        self._begun = None
        rewind.resume()
        return step

    def end(self, step: Step) -> None:
        if step.training:
            self._last = step.call

    # --- for the optimizer's step ---

    @property
    def possible(self) -> bool:
        """True if the next training iteration can be begun now, by the same plan."""
        return self._last is not None and not any(
            callback.holds_next() for callback in self._pipeline.callbacks
        )

    @property
    def last(self) -> Call:
        """The last training iteration's arguments."""
        assert self._last is not None
        return self._last

    @property
    def messages(self) -> MessageOptions:
        """How messages between ranks travel."""
        return self._pipeline.messages

    def run(self, validator: StepValidator) -> None:
        """Begin the next training iteration, after the step before it, up to its validation.

        The next call goes on from there, if it is as the last one was; else, or if anything else
        comes first, ``drop`` has to be called, on all ranks.
        """
        assert self._begun is None
        call = self.last
        rewind = Rewind(call.iteration.models, call.iteration.data_iterators)
        step = self._pipeline.begin(call, StepOperations(validator))
        try:
            with self._pipeline.watchdog(step.rank).armed():
                step.executor.run(until=head_length(step.plan.ranks[step.rank]))
        except BaseException:
            self._pipeline.drop(step, failed=True)
            raise
        rewind.suspend()
        self._begun = step, rewind

    def drop(self) -> None:
        """Undo the begin of an iteration, if there is one; the next call begins it again."""
        if self._begun is None:
            return
        (step, rewind), self._begun = self._begun, None
        with self._pipeline.watchdog(step.rank).armed():
            self._pipeline.drop(step, failed=False)
        rewind.undo()
        for model in step.call.iteration.models:
            _forget_gathered(model)


def _forget_gathered(model: Any) -> None:
    """Parameters will be gathered again before they are used, where Megatron overlaps that: what
    has begun for the dropped passes may be of a step that is undone now."""
    groups = [
        *getattr(model, "bucket_groups", ()),
        *getattr(model, "expert_parallel_bucket_groups", ()),
    ]
    for bucket_group in groups:
        if bucket_group.param_gather_handle is not None:
            bucket_group.param_gather_handle.wait()
            bucket_group.param_gather_handle = None
        # Else a pass that gathers for itself would find it done.
        bucket_group.param_gather_dispatched = False
