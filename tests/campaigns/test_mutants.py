"""Changes of one operator that default tests must notice; some once survived them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

LIST = Path(__file__).parent / "mutants.jsonl"


@pytest.mark.timeout(3600)
def test_all_are_caught() -> None:
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.mutants", "--again", str(LIST)],
        cwd=ROOT,
        env=quiet,
        capture_output=True,
        text=True,
    )
    count = len(LIST.read_text().splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{count} of {count} changes caught\n")
