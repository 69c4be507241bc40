"""The CPU shim, each part in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.waiting import PATIENCE

pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
NAMES = re.findall(r"^def (check_\w+)", (HERE / "shim_checks.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(environment: dict[str, str]) -> dict[str, str | None]:
    """All checks of ``shim_checks.py``, run in one process."""
    run = subprocess.run(
        [sys.executable, HERE / "shim_checks.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_shim(name: str, results: dict[str, str | None]) -> None:
    assert results[name] is None, results[name]


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        pytest.param("9.0", "passed (9, 0)", marks=pytest.mark.matrix),
        ("Hopper", "=Hopper is not a compute capability"),
    ],
)
def test_capability(capability: str, text: str, environment: dict[str, str]) -> None:
    """Megatron checks hardware queues with tensor parallelism as on the GPU that is named."""
    pytest.importorskip("megatron.training", reason="Megatron's arguments are part of its training")
    program = """
import os, sys
import megatron_ext.cpu
megatron_ext.cpu.install()
import torch
from megatron.training.arguments import parse_args, validate_args
sys.argv[1:] = (
    "--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 8 --num-attention-heads 2 "
    "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --transformer-impl local "
    "--sequence-parallel --no-persist-layer-norm"
).split()
try:
    validate_args(parse_args())
except AssertionError as error:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in str(error)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    validate_args(parse_args())
    assert torch.cuda.get_device_properties(0).major == 9
    print("passed", torch.cuda.get_device_capability())
"""
    run = subprocess.run(
        [warm.python(""), "-c", program],
        env={
            **environment,
            "MEGATRON_EXT_CPU_CAPABILITY": capability,
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "WORLD_SIZE": "2",
            "RANK": "0",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert text in run.stdout + run.stderr, run.stderr[-2000:]


def test_collectives_of_two_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [warm.python(""), "-m", "tests.ranks.cpu.collective_checks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def test_install_after_megatron_says_so(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    program = """
import sys
import megatron.core
import megatron_ext.cpu
megatron_ext.cpu.install()
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 1
    assert "call it first" in run.stderr
