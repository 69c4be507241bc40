"""``--pp-microbatch-costs lengths``: what is refused, and what it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Conflict, Run
from megatron_ext.integration.features.lengths import Lengths
from megatron_ext.integration.features.schedule import Schedule
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.schedule import NAMES, generate
from megatron_ext.schedule.io import save
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


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("rule", Lengths.conflicts, ids=lambda rule: rule.flag)
def test_conflicts(rule: Conflict, library: bool) -> None:
    values: dict[str, Any] = {rule.attribute: list(rule.values) or 2}
    if rule.beside:
        checked(library=library, **values)
        values["pp_reorder_microbatches"] = True
    with pytest.raises(
        ConfigError, match=f"--pp-microbatch-costs lengths does not support {rule.flag}"
    ):
        checked(library=library, **values)
    for off in rule.off:
        checked(library=library, **{rule.attribute: off})


def test_orders_that_cannot_be_made(tmp_path: Any) -> None:
    path = tmp_path / "x.json"
    save(generate("zb-h1", 2, 4), path)
    for schedule, why in ((str(path), "the order in it is fixed"), ("dualpipev", "run in pairs")):
        with pytest.raises(ConfigError, match=why):
            checked(schedule)


def test_auto_leaves_out_what_cannot_be_made() -> None:
    assert [name for name in NAMES if name not in suiting(None, True, equal=False)] == ["dualpipev"]
    assert suiting(None, True) == NAMES
    run = Run(
        arguments(pp_microbatch_costs="lengths"), "0.19.0", request=ScheduleRequest.of("auto")
    )
    check(run, Schedule)
    assert run.request is not None and run.request.decided is not None
    assert "dualpipev" not in run.request.note
