"""A schedule added by docs/develop/extending.md, in a copy of the package: training has it."""

from __future__ import annotations

from pathlib import Path

from tests.support.new_schedule import copy_with_stand_in


def test_auto_in_training(tmp_path: Path) -> None:
    run = copy_with_stand_in(tmp_path)
    code = """if True:
        from megatron_ext.integration.features.schedule.choose import ScheduleRequest
        choice = ScheduleRequest.of("auto").decide(4, 8).resolve(4, 2, 8)
        print(choice.name, choice.plan(8).name, choice.plan(3).name)
        print(ScheduleRequest.of("stand-in").resolve(4, 2, 8).plan(8).name)
    """
    assert run("-c", code).split() == ["stand-in"] * 4
