"""The lowered schedules of a run, one for each number of microbatches that it has had lately."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..schedule.generators import forward_only
from ..schedule.passes.check import check
from ..schedule.passes.lower import lower
from ..schedule.placement import Placement
from ..schedule.planner import StepUnits
from ..schedule.post_validation import add_post_validation
from ..schedule.schedule import Schedule
from .callbacks import Callback, Loads, PlanInputs, arranged
from .errors import ConfigError
from .later import Armed, Searches
from .utils import gather_over

if TYPE_CHECKING:
    from .features.schedule.choose import ScheduleRequest

_Key = tuple[StepUnits, bool]  # and training
MOST_PLANS = 32  # that are kept; a large one takes 20 MB of host memory


class Plans:
    """Makes, checks and keeps them.

    The first training schedule is searched for before its step. Numbers of microbatches that come
    later, in mid-run, do not stop training: see ``later``.

    Args:
        choice: what training runs, given the microbatches of its first step.
        placement: of that schedule, and of evaluation.
        inputs: what training schedules depend on; if it is marked as changed, new ones are made.
        post_validation: lowered training schedules hold optimizer post-validation.
        barriers: of a sharded vocabulary, in evaluation as in training schedules; 0: it is not
            sharded.
    """

    def __init__(
        self,
        choice: Callable[[int], ScheduleRequest],
        placement: Placement,
        inputs: PlanInputs | None = None,
        post_validation: bool = False,
        barriers: int = 0,
    ) -> None:
        self._choice, self._placement, self._barriers = choice, placement, barriers
        self._inputs, self._post_validation = inputs or PlanInputs(), post_validation
        self._kept: dict[_Key, Schedule] = {}  # the last used last
        self._searches = Searches()
        self._begun = False

    def lowered(
        self,
        microbatches: int,
        training: bool,
        group: Any,
        armed: Armed,
        callbacks: Sequence[Callback] = (),
        loads: Loads | None = None,
        groups: Sequence[Any] = (),
    ) -> Schedule:
        """The plan of an iteration, made and verified at its first use; collective then, and when a
        better one takes its place.

        Args:
            microbatches: of the iteration; other pipelines may have another number.
            training: False for evaluation, which runs forward passes only.
            armed: a watchdog around what is collective.
            callbacks: learn of new training plans.
            loads: of the step; None: its microbatches count as equal.
            groups: of the call, beside the pipeline (see ``groups_of_call``).

        Raises:
            ConfigError: the ranks have made different plans.
        """
        if self._inputs.changed:
            self.close()
            self._kept = {key: kept for key, kept in self._kept.items() if not key[1]}
            self._inputs.changed, self._begun = False, False
        own = loads if loads is not None and loads.units else None
        units = StepUnits(microbatches) if own is None else own.step
        key = units, training
        former = self._kept.pop(key, None)
        if training:
            self._searches.step()
        made: Schedule | None = None
        if former is None:
            made = self._new(units, training, group)
            self._begun |= training
        elif training and own is None:
            made = self._searches.take(microbatches, group, armed)
        if made is not None:
            plan = self._ready(made, training)
            with armed("for ranks of its pipeline, to compare plans", quiet=(ConfigError,)):
                _require_equal(plan, groups or (group,))
        else:
            assert former is not None
            plan = former
        self._kept[key] = plan
        while len(self._kept) > MOST_PLANS:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            if oldest[1] and not oldest[0].shares:
                self._searches.drop(oldest[0].microbatches)
        for callback in callbacks if training and made is not None else ():
            if own is not None:
                callback.planned_for(plan, arranged(own, plan))
            elif former is None:
                callback.planned(plan)
            else:
                callback.improved(plan, former)
        return plan

    def in_force(self, microbatches: int) -> Schedule | None:
        """The training plan for ``microbatches`` that was used last."""
        kept = reversed(self._kept.items())
        wanted = (p for (units, train), p in kept if train and units.microbatches == microbatches)
        return next(wanted, None)

    def close(self) -> None:
        """End what is searched for beside training."""
        self._searches.close()

    def _new(self, units: StepUnits, training: bool, group: Any) -> Schedule:
        microbatches = units.microbatches
        if not training:
            return forward_only(self._placement, microbatches, self._barriers)
        choice, knowledge = self._choice(microbatches), self._inputs.knowledge
        # A cap that no quick order keeps is for the search.
        with contextlib.suppress(ValueError):
            if self._begun and not units.shares:
                assert choice.planner is not None
                request = choice.planner.later(microbatches, knowledge)
                if request is not None:
                    order = request.quick()
                    self._searches.add(microbatches, request, group.rank() == 0)
                    return order
        return choice.plan(units, knowledge)

    def _ready(self, made: Schedule, training: bool) -> Schedule:
        plan = lower(made)
        if training and self._post_validation:
            plan = add_post_validation(plan)
        check(plan, forward_only=not training)
        return plan


def _require_equal(plan: Schedule, groups: Sequence[Any]) -> None:
    """All ranks of a call must follow one plan: another one would deadlock or mix data.

    Pipelines that share nothing within passes are not compared: with batches of variable length
    each may have its own number of microbatches."""
    every = gather_over(plan.fingerprint(), groups)
    if len(set(every)) != 1:
        raise ConfigError(
            f"ranks made different plans for schedule {plan.name}: {every}; start all "
            "ranks with the same flags, schedule file and megatron_ext version"
        )
