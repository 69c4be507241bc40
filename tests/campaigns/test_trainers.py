"""Frameworks on megatron-core train under our schedules as under Megatron's, to the last bit.

Their own training steps run where $MEGATRON_EXT_TRAINERS is a folder of their checkouts (by the
repository's name: verl, RL, ms-swift, Megatron-Bridge); loops that copy their calls run
always.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.case_server import Cases
from tests.support.checkouts import INSTALLED, environment, missing, python_path

# The folder of the step's package, what Megatron it runs on, what it needs installed.
FRAMEWORKS = {
    "verl": (".", "core_v0.18.2", ("tensordict", "omegaconf", "hydra")),
    "RL": (".", "core_v0.20.0-d98e8a64", ("hydra",)),
    "ms-swift": (".", INSTALLED, ()),
    "Megatron-Bridge": ("src", "core_v0.20.0-d98e8a64", ("omegaconf",)),
}
LOOPS = tuple(f"loop: {name}" for name in FRAMEWORKS)
SCHEDULES = ("zb-h1", "interleaved-zb", "v-half")


def checkout(framework: str) -> Path:
    """Where the framework lies, whether or not it is there."""
    folder = FRAMEWORKS[framework][0]
    return Path(os.environ.get("MEGATRON_EXT_TRAINERS", "missing")) / framework / folder


def left_out(framework: str) -> str:
    """Why its step cannot run here; empty if it can."""
    _, tag, packages = FRAMEWORKS[framework]
    if not checkout(framework).is_dir():
        return f"no checkout of {framework} in $MEGATRON_EXT_TRAINERS"
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else missing(tag)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    """The stand-ins' results."""
    cases = Cases("campaigns.trainers.steps", tmp_path_factory.mktemp("loops"), environment())
    yield cases
    cases.close()


@pytest.fixture(scope="module")
def step(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cases]:
    """The results of one framework's own step."""
    framework = request.param
    if reason := left_out(framework):
        pytest.skip(reason)
    # Behind ours: where ``left_out`` may have found the framework's packages.
    paths = [python_path(FRAMEWORKS[framework][1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        "MEGATRON_EXT_TRAINER": framework,
        "MEGATRON_EXT_TRAINER_PATH": str(checkout(framework)),
    }
    cases = Cases("campaigns.trainers.steps", tmp_path_factory.mktemp("step"), variables)
    yield cases
    cases.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_with_its_calls(loops: Cases, loop: str, schedule: str) -> None:
    assert loops[f"{loop} {schedule}"] == loops[f"{loop} stock"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("framework", "step"), [(name, name) for name in FRAMEWORKS], indirect=["step"]
)
def test_its_own_step(framework: str, step: Cases, schedule: str) -> None:
    assert step[f"{framework} {schedule}"] == step[f"{framework} stock"]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_comparison_can_fail(loops: Cases, loop: str) -> None:
    """Values return, and training changes them."""
    first, second, third = map(str, loops[f"{loop} stock"]["returned"])
    assert len({first, second, third}) == 3 and "0x" in first
