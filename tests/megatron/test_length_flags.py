"""``--pp-microbatch-costs lengths``: what is refused, and what it asks for."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration.feature import Run
from megatron_ext.integration.features import lengths
from megatron_ext.integration.features.lengths import Lengths
from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.plan.loads import Load
from megatron_ext.schedule import NAMES, ScheduleSpec
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.planner import Planner, StepUnits
from megatron_ext.schedule.select import suiting
from tests.support.stand_ins import check

from .test_flags import arguments


def checked(schedule: str = "v-half", library: bool = False, **changed: Any) -> Run:
    """A run whose flags the feature has checked."""
    args = arguments(**({"pp_microbatch_costs": "lengths"} | changed))
    run = Run(args, "0.19.0", library=library, request=ScheduleRequest.of(schedule))
    Lengths().check_flags(run)
    Lengths().check(run)
    return run


def test_off_without_it() -> None:
    for value in (None, "equal"):
        run = checked(pp_microbatch_costs=value, pp_offload="full")
        assert Lengths().start(run) == ()


def test_auto_leaves_out_what_cannot_be_made() -> None:
    assert [name for name in NAMES if name not in suiting(None, True, equal=False)] == ["dualpipev"]
    assert suiting(None, True) == NAMES
    run = Run(
        arguments(pp_microbatch_costs="lengths"), "0.19.0", request=ScheduleRequest.of("auto")
    )
    check(run, Schedule)
    assert run.request is not None and run.request.decided is not None
    assert "dualpipev" not in run.request.note


@pytest.mark.parametrize(("tokens", "planned"), [(64, False), (100, False), (200, True)])
def test_equal_ones_that_are_longer_are_planned_under_a_cap_in_bytes(
    monkeypatch: pytest.MonkeyPatch, tokens: int, planned: bool
) -> None:
    """The cap is for whole ones: two of twice their length would hold twice the bytes."""
    monkeypatch.setattr(lengths, "_agreed", lambda mine, step: ([Load.of([tokens])] * 2, [0]))
    args = SimpleNamespace(seq_length=100, micro_batch_size=1, hidden_size=64, pp_slice_tokens=None)
    feature: Any = Lengths()
    feature._free, feature._read = False, lambda step: None
    feature._run = SimpleNamespace(
        args=args, request=SimpleNamespace(cap_bytes=1 << 30, cut=None), slices_of=None,
    )  # fmt: skip
    call = SimpleNamespace(shape=None, iteration=SimpleNamespace(num_microbatches=2))
    step: Any = SimpleNamespace(training=True, call=call)
    feature.before_plan(step)
    assert bool(step.loads.units) is planned
    if planned:
        spec = ScheduleSpec("v-cap", 4, 2, cap=ShareCap(Fraction(1, 4)))
        with pytest.raises(ValueError, match="takes 2 times"):
            Planner(spec).plan(StepUnits(2, step.loads.units))
