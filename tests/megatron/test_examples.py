"""Every script of ``examples`` runs by the command of its first line."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import run

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PROOFS = {
    "own_loop": ["rank 0: 50 losses and weights equal bit for bit: True", "rank 1: 75 losses"],
    "offload_policy": [
        "rank 0: 50 losses and weights equal bit for bit: True",
        "rank 1: 75 losses",
    ],
    "custom_schedule": [
        "refused before anything runs: the order cannot progress",
        "1f1b: bubble 11.1%, peak 2",
        "delayed-w: bubble 4.0%, peak 2",
    ],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_does_what_it_says(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 90
    command = re.match(r'"""Run it with: (.*)\n', text)
    assert command is not None
    words = [str(ROOT / w) if w.startswith("examples/") else w for w in shlex.split(command[1])]
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    words[:1] = [sys.executable, *(torchrun if words[0] == "torchrun" else [])]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run(words)
    assert done.returncode == 0, done.stdout
    for line in PROOFS[script.stem]:
        assert line in done.stdout, done.stdout
    assert f"({script.name})" in (ROOT / "examples" / "README.md").read_text()
