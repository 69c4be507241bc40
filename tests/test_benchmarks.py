"""The benchmark scripts run on a bare Python and write what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest


def test_schedules(repo_root: Path, tmp_path: Path) -> None:
    """-S and -I: no package, no environment; torch is compared where there is one, not here."""
    script = repo_root / "benchmarks" / "schedules.py"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            str(script),
            "--smoke",
            "--no-torch",
            "--date",
            "2026-01-02",
            "--output",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    data = json.loads((tmp_path / "results" / "2026-01-02-schedules.json").read_text())
    assert (data["scope"], data["torch"]) == ("smoke", None)
    timeless = [c for c in data["claims"] if not c["group"].startswith("generation time")]
    assert all(claim["holds"] in (True, None) for claim in timeless)
    assert all(len(row) == len(data["columns"]) for row in data["rows"])
    assert ["v-half", 4, 8, "1,1,1", "0", 26.5, 0.09434, 3.0] in data["rows"]
    page = (tmp_path / "schedules.md").read_text()
    assert "## Losses" in page
    assert "python3 benchmarks/schedules.py" in page
    plot = ElementTree.parse(tmp_path / "results" / "2026-01-02-pareto-1.svg").getroot()
    assert plot.tag.endswith("svg")
    assert str(repo_root) not in page + json.dumps(data)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch; ./scripts/test.sh has it"
)
def test_offload(repo_root: Path, tmp_path: Path) -> None:
    """Next to nothing of it: what was planned is what was counted. Times are not looked at."""
    options = f"--output {tmp_path} --date 2026-01-02 "
    options += "--schedules interleaved --ks 0.25 --pp 2 --microbatches 4 --pass-ms 2 --repeats 1"
    script = repo_root / "benchmarks" / "offload.py"
    done = subprocess.run(
        [sys.executable, str(script), *options.split()],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    data = json.loads((tmp_path / "results" / "2026-01-02-offload.json").read_text())
    assert [row["mode"] for row in data["rows"]] == ["none", "half", "full", "auto"]
    assert all(row["sets"] == row["planned_sets"] for row in data["rows"])
    assert data["rows"][2]["moved"] > 0
    assert "## `interleaved`" in (tmp_path / "offload.md").read_text()
    assert str(repo_root) not in json.dumps(data)
