"""The lowered schedules of a run, one for each number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..schedule.generators import forward_only
from ..schedule.passes.check import check
from ..schedule.passes.lower import lower
from ..schedule.placement import Placement
from ..schedule.post_validation import add_post_validation
from ..schedule.schedule import Schedule
from .callbacks import Callback, PlanInputs
from .errors import ConfigError
from .utils import gather


class Plans:
    """Makes, checks and keeps them.

    Args:
        make: the training schedule (compute and offload actions) for a number of microbatches.
        placement: of that schedule, and of evaluation.
        inputs: what training schedules depend on; if it is marked as changed, new ones are made.
        post_validation: lowered training schedules hold optimizer post-validation.
        barriers: of a sharded vocabulary, in evaluation as in training schedules; 0: it is not
            sharded.
    """

    def __init__(
        self,
        make: Callable[[int], Schedule],
        placement: Placement,
        inputs: PlanInputs | None = None,
        post_validation: bool = False,
        barriers: int = 0,
    ) -> None:
        self._make, self._placement, self._barriers = make, placement, barriers
        self._inputs, self._post_validation = inputs or PlanInputs(), post_validation
        self._kept: dict[tuple[int, bool], Schedule] = {}

    def lowered(
        self, microbatches: int, training: bool, group: Any, callbacks: Sequence[Callback] = ()
    ) -> Schedule:
        """The plan of an iteration, made and verified at its first use; collective then.

        Args:
            microbatches: of the iteration; other pipelines may have another number.
            training: False for evaluation, which runs forward passes only.
            callbacks: learn of new training plans.

        Raises:
            ConfigError: the ranks have made different plans.
        """
        if self._inputs.changed:
            self._kept = {key: plan for key, plan in self._kept.items() if not key[1]}
            self._inputs.changed = False
        key = (microbatches, training)
        if key not in self._kept:
            if training:
                plan = lower(self._make(microbatches))
                plan = add_post_validation(plan) if self._post_validation else plan
            else:
                plan = lower(forward_only(self._placement, microbatches, self._barriers))
            check(plan, forward_only=not training)
            _require_equal(plan, group)
            self._kept[key] = plan
            for callback in callbacks if training else ():
                callback.planned(plan)
        return self._kept[key]


def _require_equal(plan: Schedule, group: Any) -> None:
    """All ranks of a pipeline must follow one plan: another one would deadlock or mix data.

    Pipelines are compared no further: with batches of variable length each may have its own number
    of microbatches, and what plans are made from has been agreed on by all ranks of the job."""
    every = gather(plan.fingerprint(), group)
    if len(set(every)) != 1:
        raise ConfigError(
            f"ranks made different plans for schedule {plan.name}: {every}; start all "
            "ranks with the same flags, schedule file and megatron_ext version"
        )
