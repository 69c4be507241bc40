"""The benchmark scripts run on a bare Python and write what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE

BARE = (sys.executable, "-E", "-s", "-S")  # no package, no environment


def test_schedules(repo_root: Path, tmp_path: Path) -> None:
    """No package, no environment; torch is compared where there is one, not here."""
    done = subprocess.run(
        [
            *BARE,
            *("-m", "benchmarks.schedules"),
            "--smoke",
            "--no-torch",
            "--date",
            "2026-01-02",
            "--output",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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
    assert "python3 -m benchmarks.schedules" in page
    plot = ElementTree.parse(tmp_path / "results" / "2026-01-02-pareto-1.svg").getroot()
    assert plot.tag.endswith("svg")
    assert str(repo_root) not in page + json.dumps(data)
    assert not (tmp_path / "results" / "2026-01-02-schedules.part").exists()


def test_schedules_goes_on_where_it_was_interrupted(repo_root: Path, tmp_path: Path) -> None:
    """What the file of an interrupted run holds is not computed again; the rest is."""
    code = """
import json, sys
from dataclasses import replace
from pathlib import Path
from benchmarks.schedules import _table
from benchmarks.schedule_scope import SMOKE
part = Path(sys.argv[1])
first = _table(SMOKE, False, part)
part.write_text(part.read_text().replace('"v-half"', '"of the file"'))
names = [row.name for row in _table(replace(SMOKE, factors=(2, 3)), False, part)]
assert len(names) == 2 * len(first), names
assert names.count("of the file") == names.count("v-half") == 1, names
assert [row.name for row in _table(SMOKE, False, Path(sys.argv[2]))] == [r.name for r in first]
"""
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(
        [*BARE, "-c", code, *files],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def run(repo_root: Path, tmp_path: Path, script: str, options: str, status: int = 0) -> str:
    """Run a benchmark; returns what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *options.split()]
    command += ["--output", str(tmp_path), "--date", "2026-01-02"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def results(repo_root: Path, tmp_path: Path, name: str) -> dict[str, Any]:
    """The JSON file of a benchmark."""
    text = (tmp_path / "results" / f"2026-01-02-{name}.json").read_text()
    assert str(repo_root) not in text
    return json.loads(text)


def test_rivals_that_are_faster_are_named(repo_root: Path) -> None:
    """A table in which a rival wins in one cell, is larger in another, and is alone in a third."""
    code = """
import sys
from benchmarks.schedule_page import _faster
from benchmarks.schedule_sweep import Row, Setting
one, two, three = (Setting(4, m, ("1", "1", "1"), "0") for m in (4, 8, 16))
rows = [
    Row("torch A", one, 10.0, 0.1, 4.0), Row("v-zb", one, 11.0, 0.1, 4.0),
    Row("torch A", two, 10.0, 0.1, 5.0), Row("v-zb", two, 10.0, 0.1, 4.0),
    Row("torch A", three, 10.0, 0.1, 3.0), Row("v-zb", three, 9.0, 0.1, 4.0),
]
print("\\n".join(_faster(rows)))
"""
    done = subprocess.run(
        [*BARE, "-c", code], cwd=repo_root, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "In 1 of 3 comparisons" in done.stdout
    assert "| torch A | 4 | 4 | 1,1,1 | 0 | v-zb | 10.00 % | 1.00, 1.00 |" in done.stdout
    assert "| torch A | 4 | 16 | 1,1,1 | 0 | none takes as little |  | 0.75 |" in done.stdout


def test_emulated_pipeline(repo_root: Path, tmp_path: Path) -> None:
    """Next to nothing of it, so that no time can hold: the check says so."""
    options = "--schedules 1f1b,v-half,v-zb --pp 2 --microbatches 4 --unit-ms 1 --repeats 1"
    out = run(repo_root, tmp_path, "emulated_pipeline", f"{options} --check", status=1)
    assert "missed, m = 4: every schedule of ours within 3 % of its simulation" in out
    rows = {
        row["name"]: row
        for row in results(repo_root, tmp_path, "emulated-pipeline")["rows"]["rows"]
    }
    assert {"ours v-half", "stock 1f1b", "stock interleaved", "torch ZBVZeroBubble"} < rows.keys()
    for name, row in rows.items():
        assert row["step"] >= row["simulated"], name
        assert row["counted"] in ((row["peak"],) if name.startswith("ours") else (None,)), name
    # 3(m + p - 1) and (6m + p - 1)/2 units of a millisecond.
    assert rows["stock 1f1b"]["simulated"] == rows["ours 1f1b"]["simulated"] == 0.015
    assert rows["torch 1F1B"]["simulated"] == 0.015
    assert rows["ours v-zb"]["simulated"] == 0.0125
    assert "## m = 4" in (tmp_path / "emulated_pipeline.md").read_text()


def test_executor_overhead(repo_root: Path, tmp_path: Path) -> None:
    """Next to nothing of it; times are not looked at."""
    options = "--pp 2 --microbatches 4 --steps 1 --rounds 1 --sizes 2x4"
    run(repo_root, tmp_path, "executor_overhead", options)
    data = results(repo_root, tmp_path, "executor-overhead")["rows"]
    passes = {row["name"]: row["passes"] for row in data["rows"]}
    assert passes["stock 1f1b"] == passes["ours in Megatron 1f1b"] == passes["torch 1F1B"] == 8
    assert passes["stock interleaved"] == passes["ours in Megatron interleaved"] == 16
    assert passes["ours v-half"] == 24
    assert all(row["thread"] > 0 for row in data["rows"])
    assert {row["name"] for row in data["making"]} >= {"ours v-half", "torch ZBVZeroBubble"}
    assert "## Making a schedule" in (tmp_path / "executor_overhead.md").read_text()


def test_offload(repo_root: Path, tmp_path: Path) -> None:
    """Next to nothing of it: what was planned is what was counted. Times are not looked at."""
    options = "--schedules interleaved --ks 0.25 --pp 2 --microbatches 4 --pass-ms 2 --repeats 1"
    run(repo_root, tmp_path, "offload", options)
    data = results(repo_root, tmp_path, "offload")
    assert [row["mode"] for row in data["rows"]] == ["none", "half", "full", "auto"]
    assert all(row["sets"] == row["planned_sets"] for row in data["rows"])
    assert data["rows"][2]["moved"] > 0
    assert "## `interleaved`" in (tmp_path / "offload.md").read_text()
    run(repo_root, tmp_path, "offload", f"--per-tensor --repeats 1 --against {repo_root}")
    rounds = results(repo_root, tmp_path, "offload-host")["rounds"]
    assert [len(rounds[name]) for name in ("now", "before")] == [1, 1]
    text = (tmp_path / "offload.md").read_text()
    assert "## `interleaved`" in text and text.count("## Host time of a saved tensor") == 1


def test_lengths(repo_root: Path, tmp_path: Path) -> None:
    """Two seeds of each distribution; then the page alone, the same again."""
    command = [*BARE, "-m", "benchmarks.lengths", "--output", str(tmp_path)]
    more = ["--seeds", "2", "--date", "2026-01-02"]
    subprocess.run([*command, *more], cwd=repo_root, timeout=PATIENCE, check=True)
    rows = results(repo_root, tmp_path, "lengths")["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["idle"]["slices, arranged, search"] < row["idle"]["planned for the mean"] / 3
    text = (tmp_path / "lengths.md").read_text()
    assert text.count("| planned for the mean |") == 2
    again = ["--page-of", str(tmp_path / "results" / "2026-01-02-lengths.json")]
    subprocess.run([*command, *again], cwd=repo_root, timeout=PATIENCE, check=True)
    assert (tmp_path / "lengths.md").read_text() == text


def test_step_lengths(repo_root: Path, tmp_path: Path) -> None:
    """One seed; orders are made for the step, in the cap's memory."""
    command = [*BARE, "-m", "benchmarks.step_lengths", "--output", str(tmp_path)]
    command += ["--seeds", "1", "--date", "2026-01-02"]
    subprocess.run(command, cwd=repo_root, timeout=PATIENCE, check=True)
    rows = results(repo_root, tmp_path, "step_lengths")["rows"]
    assert len(rows) == 12
    for row in rows:
        ways = row["ways"]
        assert ways["free"]["idle"] < ways["given"]["idle"]
        if row["name"] == "v-cap":
            assert all(way["memory"] <= 4.8 for name, way in ways.items() if "equal" not in name)


def test_adaptive(repo_root: Path, tmp_path: Path) -> None:
    """The smallest cells, and what the page says of them; then the page alone, the same again."""
    command = [*BARE, "-m", "benchmarks.adaptive", "--most", "32", "--random", "8"]
    command += ["--output", str(tmp_path), "--date", "2026-01-02"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=PATIENCE)
    rows = results(repo_root, tmp_path, "adaptive")["stored"]
    lost = sum(row["ours"] > 1.001 * row["theirs"] for row in rows)
    assert len(rows) == 30 and done.returncode == (lost > 0), done.stderr[-2000:]
    assert all(row["bound"] <= row["ours"] and row["peak"] <= row["sets"] for row in rows)
    assert f"{lost} of 30 cells are lost by more than 0.1 %" in done.stdout
    text = (tmp_path / "adaptive.md").read_text()
    assert f"Of 30 cells {lost} are lost" in text and text.count("**+") == 2 * lost
    again = [*BARE, "-m", "benchmarks.adaptive", "--output", str(tmp_path), "--page-of"]
    again.append(str(tmp_path / "results" / "2026-01-02-adaptive.json"))
    subprocess.run(again, cwd=repo_root, capture_output=True, timeout=PATIENCE, check=False)
    assert (tmp_path / "adaptive.md").read_text() == text
