"""The lowered schedules of a run, one for each number of microbatches that it has had lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..schedule.generators import forward_only
from ..schedule.passes.check import check
from ..schedule.passes.lower import lower
from ..schedule.placement import Placement
from ..schedule.planner import StepUnits
from ..schedule.schedule import Schedule
from .callbacks import Callback, Loads, PlanInputs, arranged
from .errors import ConfigError
from .utils import gather_over

if TYPE_CHECKING:
    from .features.schedule.choose import ScheduleRequest

_Key = tuple[StepUnits, bool]  # and training
Armed = Callable[..., AbstractContextManager[None]]  # ``Watchdog.armed``
MOST_PLANS = 32  # that are kept; a large one takes 20 MB of host memory


class Plans:
    """Makes, checks and keeps them.

    The order for a new number of microbatches is searched for before its step.

    Args:
        choice: what training runs, given the microbatches of its first step.
        placement: of that schedule, and of evaluation.
        inputs: what training schedules depend on; if it is marked as changed, new ones are made.
        barriers: of a sharded vocabulary, in evaluation as in training schedules; 0: it is not
            sharded.
    """

    def __init__(
        self,
        choice: Callable[[int], ScheduleRequest],
        placement: Placement,
        inputs: PlanInputs | None = None,
        barriers: int = 0,
    ) -> None:
        self._choice, self._placement, self._barriers = choice, placement, barriers
        self._inputs = inputs or PlanInputs()
        self._kept: dict[_Key, Schedule] = {}  # the last used last

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
        """The plan of an iteration, made and verified at its first use; collective then.

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
            self._kept = {key: kept for key, kept in self._kept.items() if not key[1]}
            self._inputs.changed = False
        own = loads if loads is not None and loads.units else None
        units = StepUnits(microbatches) if own is None else own.step
        key = units, training
        if key in self._kept:
            plan = self._kept[key] = self._kept.pop(key)
            return plan
        plan = self._ready(self._new(units, training), training)
        with armed("for ranks of its pipeline, to compare plans"):
            _require_equal(plan, groups or (group,))
        self._kept[key] = plan
        while len(self._kept) > MOST_PLANS:
            del self._kept[next(iter(self._kept))]
        for callback in callbacks if training else ():
            if own is not None:
                callback.planned_for(plan, arranged(own, plan))
            else:
                callback.planned(plan)
        return plan

    def in_force(self, microbatches: int) -> Schedule | None:
        """The training plan for ``microbatches`` that was used last."""
        kept = reversed(self._kept.items())
        wanted = (p for (units, train), p in kept if train and units.microbatches == microbatches)
        return next(wanted, None)

    def _new(self, units: StepUnits, training: bool) -> Schedule:
        if not training:
            return forward_only(self._placement, units.microbatches, self._barriers)
        return self._choice(units.microbatches).plan(units, self._inputs.knowledge)

    def _ready(self, made: Schedule, training: bool) -> Schedule:
        plan = lower(made)
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
