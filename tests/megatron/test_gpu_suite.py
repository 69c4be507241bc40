"""``benchmarks/gpu`` on the CPU with next to nothing to compute: it says what is wrong, and loses
nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE, wait_until

DATE = "2026-01-02"


def _command(out: Path, *options: str) -> list[str]:
    words = ["--tiny", "--output", str(out), "--date", DATE, *options]
    return [sys.executable, "-m", "benchmarks.gpu.run", *words]


def _parts(out: Path) -> dict[str, Any]:
    data = json.loads((out / "results" / f"{DATE}-gpu-tiny.json").read_text())
    parts: dict[str, Any] = data["parts"]
    return parts


def test_a_killed_run_keeps_what_it_has(repo_root: Path, tmp_path: Path) -> None:
    """Ended in the third part: two are in the results, no process is left, the rest comes later."""
    command = _command(tmp_path, "--part", "te", "transfers", "overhead")
    with subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            if line.startswith("{'schedule'"):  # its first row
                break
        below = Path(f"/proc/{suite.pid}/task/{suite.pid}/children").read_text().split()
        suite.terminate()
        assert suite.wait(PATIENCE) == 128 + signal.SIGTERM
    assert below
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in below), "a part goes on")
    assert list(_parts(tmp_path)) == ["te", "transfers"]
    assert _parts(tmp_path)["te"]["skipped"]
    assert (tmp_path / "results" / f"{DATE}-gpu-tiny-overhead.part").exists()
    command = _command(tmp_path, "--rest", "--part", "transfers", "overhead")
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "transfers: at most" not in done.stdout
    found = _parts(tmp_path)
    assert list(found) == ["te", "transfers", "overhead"] and len(found["overhead"]["rows"]) == 4
    assert "## How fast are copies?" in (tmp_path / "gpu.md").read_text()


@pytest.mark.matrix
def test_all_parts_end(repo_root: Path, tmp_path: Path) -> None:
    """What is exact is exact on the CPU, too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        _command(tmp_path), cwd=repo_root, env=environment, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    parts = _parts(tmp_path)
    assert all("failed" not in part for part in parts.values())
    equal = parts["equality"]["rows"]
    assert len(equal) == 10 and all(row["equal"] and row["learns"] for row in equal)
    assert sum(row["moved_sets"] > 0 for row in equal) == 3
    rows = {row["schedule"]: row for row in parts["row"]["rows"]}
    assert all(row["sets"] == row["planned_sets"] for row in rows.values())
    assert rows["po, offload full"]["speed"] == rows["po"]["speed"]  # by the same passes
    assert rows["1f1b, recompute full"]["planned_sets"] == rows["1f1b"]["planned_sets"]
    assert [row["equal"] for row in parts["graphs"]["rows"]] == [True] * 3
    slices = parts["slices"]["rows"]
    assert slices[0]["slices"] == "whole" and all(row["difference"] < 0.02 for row in slices)
    assert [row["way"] for row in parts["moe"]["rows"]][:2] == ["stock", "stock, recompute"]
    assert "**No GPU figure is in here**" in (tmp_path / "gpu.md").read_text()


def test_what_was_carried_is_found(tmp_path: Path) -> None:
    """Wheels for all parts; Transformer Engine's kit apart, since it may not load."""
    from benchmarks.gpu.run import unpacked

    with zipfile.ZipFile(tmp_path / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    with tarfile.open(tmp_path / "te-2.tar.xz", "w:xz") as kit:
        kit.addfile(tarfile.TarInfo("transformer_engine/__init__.py"), io.BytesIO())
    site = tmp_path / "site"
    unpacked(tmp_path, str(site))
    assert (site / "one" / "__init__.py").exists() and not (site / "transformer_engine").exists()
    assert (site / "engine" / "transformer_engine" / "__init__.py").exists()


def test_the_page_says_what_is_wrong() -> None:
    """Each kind of wrong result is found; a good one is not."""
    from benchmarks.gpu.page import wrong

    good = {"size": "h 64", "schedule": "po", "sets": 2, "planned_sets": 2, "equal": True,
            "work_ms": [10.0, 9.0, 11.0], "step_ms": [10.2, 10.0, 12.0]}  # fmt: skip
    assert wrong({"row": {"rows": [good]}}) == []
    assert wrong({"moe": {"failed": "not done after 1 s", "rows": []}}) == [
        "moe: not done after 1 s"
    ]
    for change, text in (
        ({"sets": 3}, "other sets than planned"),
        ({"equal": False}, "other numbers"),
        ({"work_ms": [11.0, 10.0, 12.0]}, "its work exceeds its step"),
        ({"learns": False}, "the loss never changed"),
        ({"difference": 0.1}, "other gradients"),
        ({"failed": "no memory"}, "no memory"),
    ):
        assert wrong({"row": {"rows": [good | change]}}) == [f"row, h 64, po: {text}"]
