"""A schedule added by CONTRIBUTING.md's recipe, in a copy of the package: training has it."""

from __future__ import annotations

from pathlib import Path

from tests.support.new_schedule import copy_with_stand_in


def test_auto_in_training(tmp_path: Path) -> None:
    run = copy_with_stand_in(tmp_path)
    code = """if True:
        from megatron_ext.integration.features.schedule.choose import Choice
        from megatron_ext.integration.features.schedule.families import choose
        from megatron_ext.schedule import Costs
        print(choose(4, 8, Costs(), None).schedule.name)
        choice = Choice("auto")
        choice.decide(4, 8)
        print(choice.name, choice.plan(4, 2, 8).name, choice.plan(4, 2, 3).name)
        print(Choice("stand-in").plan(4, 2, 8).name)
    """
    assert run("-c", code).split() == ["stand-in"] * 5
