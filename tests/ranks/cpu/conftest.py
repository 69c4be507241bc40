"""Shared by the tests of the launcher, the CPU shim and the scripts around them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE


@pytest.fixture(scope="session")
def environment(repo_root: Path) -> dict[str, str]:
    """An environment without torchrun's variables and with this checkout importable."""
    ours = ("RANK", "WORLD_SIZE", "MEGATRON_LM", "MEGATRON_EXT_STARTED")
    kept = {k: v for k, v in os.environ.items() if not k.endswith(ours)}
    return {**kept, "PYTHONPATH": str(repo_root)}


@pytest.fixture
def run(
    environment: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in an empty folder; keywords are environment variables."""

    def run_command(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env={**environment, **variables},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    return run_command
