"""A schedule added by docs/develop/extending.md, in a copy of the package: every tool has it.

Training has it too: tests/ranks/schedule/test_new_schedule.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.new_schedule import Run, copy_with_stand_in

SIZES = ("--pp", "4", "--microbatches", "8")
AUTO = ("--schedule", "auto", *SIZES)
MODEL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --bf16 "
    "--vocab-size 64000 --untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python on the copy; its standard output."""
    return copy_with_stand_in(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def tool(run: Run) -> Run:
    return lambda *arguments: run("-m", "megatron_ext", *arguments)


def test_by_name(tool: Run, tmp_path: Path) -> None:
    named, file = ("--schedule", "stand-in", *SIZES), str(tmp_path / "x.json")
    made = json.loads(tool("simulate", *named, "--json"))
    as_v_zb = json.loads(tool("simulate", "--schedule", "v-zb", *SIZES, "--json"))
    assert made["makespan"] == as_v_zb["makespan"]
    assert "stand-in" in tool("show", *named)
    tool("schedule", *named, "--output", file)
    assert json.loads(tool("simulate", "--schedule", file, "--json"))["schedule"] == "stand-in"


def test_compare(tool: Run) -> None:
    rows = json.loads(tool("compare", *SIZES, "--json"))["schedules"]
    assert rows[0]["schedule"] == "stand-in"  # as fast as v-zb, and simpler


@pytest.mark.parametrize("more", [(), ("--memory-cap", "1")])
def test_auto(tool: Run, more: tuple[str, ...]) -> None:
    found = json.loads(tool("simulate", *AUTO, *more, "--json"))
    assert found["schedule"] == "stand-in"
    assert "the fastest of" in found["note"]


def test_auto_with_offload(tool: Run) -> None:
    away = ("--offload", "auto", "--offload-time", "0.1", "--memory-cap", "1")
    assert json.loads(tool("simulate", *AUTO, *away, "--json"))["schedule"] == "stand-in"


def test_planner(run: Run, tool: Run) -> None:
    command = f"plan --gpu A100 {MODEL} --pipeline-model-parallel-size 4 --world-size 4".split()
    command += ["--global-batch-size", "12", "--offload", "off", "--json"]
    points = json.loads(tool(*command, "--schedules", "stand-in,v-cap", "--memory-cap", "60GiB"))
    assert points["front"][0]["schedule"] == "stand-in"
    code = f"""if True:
        from megatron_ext.plan.budget import Budget
        from megatron_ext.plan.flags import job_of, read
        from megatron_ext.plan.layout import even_split
        from megatron_ext.schedule import ScheduleSpec, select
        job = job_of(read({MODEL!r}.split())[0])
        budget = Budget(job, 1 << 40, lambda stages: even_split(16, stages))
        print(select(ScheduleSpec("auto", 4, 12, cap=budget)).schedule.name)
    """
    assert run("-c", code) == "stand-in\n"
