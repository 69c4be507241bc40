"""``doctor`` in an interpreter of its own, and what of its output is the same on every machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import __version__
from megatron_ext.commands import doctor
from megatron_ext.commands.doctor import machine
from megatron_ext.releases import TAGS
from tests.support import ROOT
from tests.support.waiting import PATIENCE

without_gpu = pytest.mark.skipif(
    bool(machine.gpus(Path("/"))) or shutil.which("nvidia-smi") is not None,
    reason="the golden output is of a machine without a GPU",
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


def normal(text: str, checkout: Path | None = None) -> str:
    """Without this machine's numbers and paths, where they are no part of the finding."""
    if checkout is not None:
        text = text.replace(str(checkout), "$CHECKOUT")
    text = text.replace(__version__, "$VERSION").replace(", ".join(TAGS), "$RELEASES")
    text = re.sub(r"(\d\.\d+\.\d+)\+[0-9a-f]{7,}", r"\1", text)  # a git checkout's commit
    # How many hooks there are changes with what we hook; that all are found, or one is not, counts.
    text = re.sub(r"(\d+) of (\d+) found", lambda n: f"all but {int(n[2]) - int(n[1])} found", text)
    text = re.sub(r"(?m)^(\w+ +(python|torch|cuda|nccl|numa|host memory) ).*\d.*", r"\1...", text)
    return text


def compare(path: Path, text: str) -> None:
    """With a golden file; UPDATE_GOLDEN=1 writes what is there now."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr but those of the progress, which comes on a slow machine."""
    return [line for line in done.stderr.splitlines() if not line.startswith("doctor: ")]
