"""Stand-ins for what Megatron passes to us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ext.integration.arguments import MegatronArgs
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.post_validation import PostValidation
from megatron_ext.integration.features.profile import ProfileSteps
from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.features.schedule.choose import Choice, ScheduleRequest


def megatron_args(**values: Any) -> SimpleNamespace:
    """Megatron's arguments with these values; every other one that we read by name is None."""
    return SimpleNamespace(**{**dict.fromkeys(MegatronArgs.__annotations__), **values})


_SCHEDULING = (ProfileSteps(), Schedule(), PostValidation())


def before_megatron(args: Any, request: ScheduleRequest) -> ScheduleRequest:
    """The checks of a schedule's flags before Megatron's own validation."""
    run = Run(args, "0.0.0", request=request)
    for feature in _SCHEDULING:
        feature.check(run)
    assert run.request is not None
    return run.request


def after_megatron(args: Any, request: ScheduleRequest) -> Choice:
    """The checks after Megatron's own validation; what runs."""
    run = Run(args, "0.0.0", request=request)
    for feature in _SCHEDULING:
        feature.check_derived(run)
    assert run.schedule is not None and run.chunks == run.schedule.placement.chunks
    return run.schedule
