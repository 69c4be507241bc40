"""``doctor`` in an interpreter of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from megatron_ext.commands import doctor
from tests.support import ROOT
from tests.support.waiting import PATIENCE

without_gpu = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None,
    reason="the findings are of a machine without a GPU",
)


def run(*arguments: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """doctor in an interpreter of its own, with no variable that it would remark on."""
    clean = re.compile(r"CUDA|NCCL|TORCH|PYTORCH|MEGATRON|PYTHON")
    env = {name: value for name, value in os.environ.items() if not clean.match(name)}
    env[doctor.SECONDS_ENVIRONMENT] = str(PATIENCE)  # a busy machine is not broken
    command = [sys.executable, *(["-S"] if bare else []), "-m", "megatron_ext", "doctor"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr but those of the progress, which comes on a slow machine."""
    return [line for line in done.stderr.splitlines() if not line.startswith("doctor: ")]
