"""Every benchmark runs with next to nothing to do, and its committed page is what its results say.

``benchmarks/gpu`` has a test of its own (tests/megatron/test_gpu_suite.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.waiting import PATIENCE

DATE = "2026-01-02"
Results = dict[str, Any]


def run(folder: Path, script: str, options: str, *, status: int = 0) -> str:
    """Run a benchmark; returns what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *options.split()]
    command += ["--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def miniature(folder: Path, name: str, options: str, *, status: int = 0) -> Results:
    """Run a benchmark in ``folder``; its results, from which its page comes out again."""
    script = name.replace("-", "_")
    run(folder, script, f"{options} --date {DATE}", status=status)
    path = folder / "results" / f"{DATE}-{name}.json"
    page = folder / f"{script}.md"
    text = page.read_text()
    assert text.startswith("# ") and f"`python -m benchmarks.{script}`, {DATE}" in text
    run(folder, script, f"--page-of {path}")
    assert page.read_text() == text
    assert str(ROOT) not in path.read_text() + text
    found: Results = json.loads(path.read_text())
    return found


def test_schedules(tmp_path: Path) -> None:
    """The table of four ranks; a peer that is faster at no more memory is counted."""
    data = miniature(tmp_path, "schedules", "--ranks 4")
    rows = {(row["name"], row["microbatches"], row["hop"]): row for row in data["rows"]}
    half = rows["v-half", 8, "0"]
    assert (half["makespan"], half["peak"]) == (26.5, 3.0)
    text = (tmp_path / "schedules.md").read_text()
    assert "| torch ZBVZeroBubble |" in text and "| v-min |" in text

    from benchmarks.schedules import faster_peers

    common = {"pp": 4, "cost": "1,1,1", "hop": "0"}
    made = [
        {"name": name, "microbatches": m, "makespan": makespan, "peak": peak, **common}
        for name, m, makespan, peak in (
            *(("torch A", 4, 10.0, 4.0), ("v-zb", 4, 11.0, 4.0)),
            *(("torch A", 8, 10.0, 5.0), ("v-zb", 8, 11.0, 4.0)),
            *(("torch A", 16, 10.0, 3.0), ("v-zb", 16, 9.0, 4.0)),
        )
    ]
    assert faster_peers("v-zb", made) == "1 of 3, by up to 10.0%"


def test_emulated_pipeline(tmp_path: Path) -> None:
    """Next to nothing of it, so that no time can hold: the check reports it."""
    options = "--schedules 1f1b,v-half,v-zb --pp 2 --microbatches 4 --unit-ms 1 --repeats 1"
    data = miniature(tmp_path, "emulated-pipeline", f"{options} --check", status=1)
    rows = {row["name"]: row for row in data["rows"]}
    assert {"ours v-half", "stock 1f1b", "stock interleaved", "torch ZBVZeroBubble"} < rows.keys()
    for name, row in rows.items():
        assert row["step"] >= row["simulated"], name
        assert row["counted"] in ((row["peak"],) if name.startswith("ours") else (None,)), name
    # 3(m + p - 1) and (6m + p - 1)/2 units of a millisecond.
    assert rows["stock 1f1b"]["simulated"] == rows["ours 1f1b"]["simulated"] == 0.015
    assert rows["torch 1F1B"]["simulated"] == 0.015
    assert rows["ours v-zb"]["simulated"] == 0.0125
    assert "every schedule of ours within 3 %" in (tmp_path / "emulated_pipeline.md").read_text()


def test_executor_overhead(tmp_path: Path) -> None:
    """Next to nothing of it; times are not looked at."""
    options = "--pp 2 --microbatches 4 --steps 1 --rounds 1"
    data = miniature(tmp_path, "executor-overhead", options)
    passes = {row["name"]: row["passes"] for row in data["rows"]}
    assert passes["stock 1f1b"] == passes["ours in Megatron 1f1b"] == passes["torch 1F1B"] == 8
    assert passes["stock interleaved"] == passes["ours in Megatron interleaved"] == 16
    assert passes["ours v-half"] == 24
    assert all(row["thread"] > 0 for row in data["rows"]) and data["model"] > 0


PAGES = ("emulated-pipeline", "executor-overhead", "schedules")


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_what_their_results_say(name: str, tmp_path: Path) -> None:
    """There is one file of results of each, and the page is of it."""
    results = ROOT / "benchmarks" / "results"
    (path,) = results.glob(f"????-??-??-{name}.json")
    script = name.replace("-", "_")
    command = [sys.executable, "-m", f"benchmarks.{script}", "--page-of", str(path)]
    subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, timeout=PATIENCE
    )
    assert (tmp_path / f"{script}.md").read_text() == (
        ROOT / "benchmarks" / f"{script}.md"
    ).read_text()
