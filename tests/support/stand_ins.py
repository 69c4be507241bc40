"""Stand-ins for what Megatron passes to us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ext.integration.arguments import MegatronArgs
from megatron_ext.integration.feature import Feature, Run
from megatron_ext.integration.features.profile import ProfileSteps
from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.features.schedule.choose import ScheduleRequest


def megatron_args(**values: Any) -> SimpleNamespace:
    """Megatron's arguments with these values; every other one that we read by name is None."""
    return SimpleNamespace(**{**dict.fromkeys(MegatronArgs.__annotations__), **values})


_SCHEDULING = (ProfileSteps, Schedule)


def check(run: Run, *features: type[Feature]) -> None:
    """What features check of a run whose arguments, or whose model, are known."""
    made = [feature() for feature in features]
    for one in made:
        one.check_flags(run)
    for one in made:
        one.check(run)


def started(feature: type[Feature], schedule: str = "v-half", **values: Any) -> Any:
    """A feature that is in force for a run with ``schedule``, as far as it is one object."""
    args = values.pop("args", None) or megatron_args(pp_schedule=schedule)
    one = feature()
    assert one.start(Run(args, "0.0.0", request=ScheduleRequest.of(schedule), **values))
    return one


def before_megatron(args: Any, request: ScheduleRequest) -> ScheduleRequest:
    """The checks of a schedule's flags before Megatron's own validation."""
    run = Run(args, "0.0.0", request=request)
    check(run, *_SCHEDULING)
    assert run.request is not None
    return run.request


def after_megatron(args: Any, request: ScheduleRequest) -> ScheduleRequest:
    """The checks after Megatron's own validation; what runs."""
    run = Run(args, "0.0.0", request=request)
    for feature in _SCHEDULING:
        feature().check_derived(run)
    assert run.schedule is not None and run.chunks == run.schedule.placement.chunks
    return run.schedule
