"""Every benchmark runs with next to nothing to do, and its committed page is what its results say.

``benchmarks/gpu`` has a test of its own (tests/megatron/test_gpu_suite.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, existing
from tests.support.waiting import PATIENCE

BARE = ("-E", "-s", "-S")  # no package, no environment
DATE = "2026-01-02"
Results = dict[str, Any]


def run(folder: Path, script: str, options: str, *python: str, status: int = 0) -> str:
    """Run a benchmark; returns what it printed."""
    command = [sys.executable, *python, "-m", f"benchmarks.{script}", *options.split()]
    command += ["--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def miniature(folder: Path, name: str, options: str, *python: str, status: int = 0) -> Results:
    """Run a benchmark in ``folder``; its results, from which its page comes out again."""
    script = name.replace("-", "_")
    run(folder, script, f"{options} --date {DATE}", *python, status=status)
    path = folder / "results" / f"{DATE}-{name}.json"
    page = folder / f"{script}.md"
    text = page.read_text()
    assert text.startswith("# ") and f"`python -m benchmarks.{script}`, {DATE}" in text
    run(folder, script, f"--page-of {path}")
    assert page.read_text() == text
    assert str(ROOT) not in path.read_text() + text
    found: Results = json.loads(path.read_text())
    return found


@pytest.mark.usefixtures("full_effort")
def test_schedules(tmp_path: Path) -> None:
    """No package, no environment; torch is compared where there is one, not here."""
    data = miniature(tmp_path, "schedules", "--scope smoke --no-torch", *BARE)
    assert (data["scope"], data["torch"]) == ("smoke", None)
    timeless = [c for c in data["claims"] if not c["group"].startswith("generation time")]
    assert len(timeless) > 15 and all(claim["holds"] in (True, None) for claim in timeless)
    assert all(len(row) == len(data["columns"]) for row in data["rows"])
    assert ["v-half", 4, 8, "1,1,1", "0", 26.5, 0.09434, 3.0] in data["rows"]
    assert "## Losses" in (tmp_path / "schedules.md").read_text()
    plot = ElementTree.parse(tmp_path / "results" / f"{DATE}-pareto-1.svg").getroot()
    assert plot.tag.endswith("svg")
    results = tmp_path / "results"
    assert not (results / f"{DATE}-schedules.part").exists()
    again = f"--times-again {results / f'{DATE}-schedules.json'} --date 2026-01-03"
    run(tmp_path, "schedules", again, *BARE)
    new = json.loads((results / "2026-01-03-schedules.json").read_text())
    assert (new["rows"], len(new["claims"])) == (data["rows"], len(data["claims"]))
    assert f"results/{DATE}-pareto-1.svg" in (tmp_path / "schedules.md").read_text()


def test_schedules_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """What the file of an interrupted run holds is not computed again; the rest is."""
    code = """
import json, sys
from dataclasses import replace
from pathlib import Path
from benchmarks.schedules import table
from benchmarks.schedule_scope import SMOKE
part = Path(sys.argv[1])
first = table(SMOKE, False, part)
part.write_text(part.read_text().replace('"v-half"', '"of the file"'))
names = [row.name for row in table(replace(SMOKE, factors=(2, 3)), False, part)]
assert len(names) == 2 * len(first), names
assert names.count("of the file") == names.count("v-half") == 1, names
assert [row.name for row in table(SMOKE, False, Path(sys.argv[2]))] == [r.name for r in first]
"""
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    command = [sys.executable, *BARE, "-c", code, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_rivals_that_are_faster_are_named() -> None:
    """A table in which a rival wins in one cell, is larger in another, and is alone in a third."""
    from benchmarks.schedule_page import _faster
    from benchmarks.schedule_sweep import Row, Setting

    one, two, three = (Setting(4, m, ("1", "1", "1"), "0") for m in (4, 8, 16))
    rows = [
        *(Row("torch A", one, 10.0, 0.1, 4.0), Row("v-zb", one, 11.0, 0.1, 4.0)),
        *(Row("torch A", two, 10.0, 0.1, 5.0), Row("v-zb", two, 10.0, 0.1, 4.0)),
        *(Row("torch A", three, 10.0, 0.1, 3.0), Row("v-zb", three, 9.0, 0.1, 4.0)),
    ]
    text, table = _faster(rows)
    assert "In 1 of 3 comparisons" in text
    assert "| torch A | 4 | 4 | 1,1,1 | 0 | v-zb | 10.00 % | 1.00, 1.00 |" in table
    assert "| torch A | 4 | 16 | 1,1,1 | 0 | none takes as little |  | 0.75 |" in table


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
    options = "--pp 2 --microbatches 4 --steps 1 --rounds 1 --sizes 2x4"
    data = miniature(tmp_path, "executor-overhead", options)
    passes = {row["name"]: row["passes"] for row in data["rows"]}
    assert passes["stock 1f1b"] == passes["ours in Megatron 1f1b"] == passes["torch 1F1B"] == 8
    assert passes["stock interleaved"] == passes["ours in Megatron interleaved"] == 16
    assert passes["ours v-half"] == 24
    assert all(row["thread"] > 0 for row in data["rows"]) and data["model"] > 0
    assert {row["name"] for row in data["making"]} >= {"ours v-half", "torch ZBVZeroBubble"}


def test_offload(tmp_path: Path) -> None:
    """What was planned is what was counted; then the host's time, in the same page."""
    options = "--schedules interleaved --ks 0.25 --pp 2 --microbatches 4 --pass-ms 2 --repeats 1"
    data = miniature(tmp_path, "offload", options)
    assert [row["mode"] for row in data["rows"]] == ["none", "half", "full", "auto"]
    assert all(row["sets"] == row["planned_sets"] for row in data["rows"])
    assert data["rows"][2]["moved"] > 0
    run(tmp_path, "offload", f"--per-tensor --repeats 1 --against {ROOT} --date {DATE}")
    path = tmp_path / "results" / f"{DATE}-offload-host.json"
    rounds = json.loads(path.read_text())["rounds"]
    assert [len(rounds[name]) for name in ("now", "before")] == [1, 1]
    text = (tmp_path / "offload.md").read_text()
    assert "## `interleaved`" in text and text.count("## Host time of a saved tensor") == 1


def test_adaptive(tmp_path: Path) -> None:
    """The smallest cells, and what the page says of them."""
    command = [sys.executable, *BARE, "-m", "benchmarks.adaptive", "--most", "32", "--random", "8"]
    command += ["--output", str(tmp_path), "--date", DATE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    path = tmp_path / "results" / f"{DATE}-adaptive.json"
    rows = json.loads(path.read_text())["stored"]
    lost = sum(row["ours"] > 1.001 * row["theirs"] for row in rows)
    assert len(rows) == 30 and done.returncode == (lost > 0), done.stderr[-2000:]
    assert all(row["bound"] <= row["ours"] and row["peak"] <= row["sets"] for row in rows)
    assert f"{lost} of 30 cells are lost by more than 0.1 %" in done.stdout
    text = (tmp_path / "adaptive.md").read_text()
    assert f"Of 30 cells {lost} are lost" in text and text.count("**+") == 2 * lost


def test_lengths(tmp_path: Path) -> None:
    """Two seeds of each distribution; then the page alone, the same again."""
    run(tmp_path, "lengths", f"--seeds 2 --date {DATE}", *BARE)
    path = tmp_path / "results" / f"{DATE}-lengths.json"
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["idle"]["slices, arranged, search"] < row["idle"]["planned for the mean"] / 3
    text = (tmp_path / "lengths.md").read_text()
    assert text.count("| planned for the mean |") == 2
    run(tmp_path, "lengths", f"--page-of {path}", *BARE)
    assert (tmp_path / "lengths.md").read_text() == text


def test_slices_run(tmp_path: Path) -> None:
    """A few steps with one slice, then with three: the losses of whole sequences."""
    options = "--cuts 1,3 --steps 3 --unit-ms 4 --rounds 1"
    data = miniature(tmp_path, "slices-run", options)
    assert len(data["whole"]) == len(data["sliced"]) == 5
    assert data["whole"][-1] < data["whole"][0]
    assert data["sliced"] == pytest.approx(data["whole"], rel=2e-6)
    assert all(row["step"] >= row["simulated"] for row in data["emulated"])


def test_step_lengths(tmp_path: Path) -> None:
    """One seed; orders are made for the step, in the cap's memory."""
    run(tmp_path, "step_lengths", f"--seeds 1 --date {DATE}", *BARE)
    path = tmp_path / "results" / f"{DATE}-step_lengths.json"
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        ways = row["ways"]
        assert ways["free"]["idle"] < ways["given"]["idle"]
        if row["name"] == "v-cap":
            assert all(way["memory"] <= 4.8 for name, way in ways.items() if "equal" not in name)
    text = (tmp_path / "step_lengths.md").read_text()
    run(tmp_path, "step_lengths", f"--page-of {path}", *BARE)
    assert (tmp_path / "step_lengths.md").read_text() == text


def _moe(data: Results) -> bool:
    peaks = {row["way"]: row["peak_bytes"] for row in data["rows"]}
    return len(peaks) == 20 and 0 < peaks["4 s4"] < 0.7 * min(peaks["4 none"], peaks["stock"])


def _overlap(data: Results) -> bool:
    stock = [row for row in data["rows"] if row["what"] == "stock combined"]
    return len(data["rows"]) == 54 and all(row["slower"] == 0 for row in stock)


def _equal(data: Results) -> bool:
    return all(row["same"] for row in data["rows"])


def _sharded(data: Results) -> bool:
    return all(row["step"] >= row["simulated"] for row in data["rows"]) and len(data["rows"]) == 4


# Name, options, and what must be so of the results; CHECKOUT stands for one.
MINIATURES: list[tuple[str, str, Callable[[Results], bool]]] = [
    ("replan", "--schedules v-zb --pp 2 --microbatches 4 --passes 2,4,2 --rounds 1", _equal),
    (
        "vocabulary-run",
        "--schedules 1f1b,v-zb --pp 2 --microbatches 4 --unit-ms 2 --repeats 1",
        _sharded,
    ),
    (
        "vocabulary",
        "--sizes 2",
        lambda data: all(row["ms"]["best"] <= row["ms"]["even"] for row in data["rows"]),
    ),
    ("overlap", "--sizes 2", _overlap),
    (
        "overlap-run",
        "CHECKOUT --pp 2 --microbatches 4 --unit-ms 4 --steps 1",
        lambda data: all(row["step"] >= row["simulated"] for row in data["rows"]),
    ),
]


@pytest.mark.version(MAIN_TAG)
@pytest.mark.parametrize(("name", "options", "holds"), MINIATURES, ids=[m[0] for m in MINIATURES])
def test_in_miniature(
    name: str,
    options: str,
    holds: Callable[[Results], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = str(existing(MAIN_TAG))
    monkeypatch.setenv("MEGATRON_LM", checkout)
    data = miniature(tmp_path, name, options.replace("CHECKOUT", checkout))
    assert data["rows"] and holds(data)


def test_moe(tmp_path: Path) -> None:
    """Two parts, the newest results of both in one page."""
    run(tmp_path, "moe", f"--ranks 2 --repeats 1 --parts memory --date {DATE}")
    assert _moe(json.loads((tmp_path / "results" / f"{DATE}-moe-memory.json").read_text()))
    options = "--ranks 2 --stock-ms 20 --repeats 1 --parts balances --date 2026-01-03"
    run(tmp_path, "moe", options)
    text = (tmp_path / "moe.md").read_text()
    assert "## Most bytes at once\n\n2026-01-02" in text
    assert "## Memory of recomputation\n\n2026-01-03" in text


@pytest.mark.version(MAIN_TAG)
def test_feature_matrix(tmp_path: Path) -> None:
    """One feature under one schedule, and a page of it."""
    path = tmp_path / "features.json"
    options = f"{existing(MAIN_TAG)} --features dropout --schedules 1f1b --json {path}"
    run(tmp_path, "feature_matrix", options)
    cells = json.loads(path.read_text())["cells"]
    assert cells and {cell["result"] for cell in cells} <= {"equal", "no stock"}
    run(tmp_path, "feature_matrix", f"--page-of {path}")
    text = (tmp_path / "feature-matrix.md").read_text()
    assert "| feature | 1f1b |" in text and text.count("\n| ") == 2 + len(cells)


@pytest.mark.version(MAIN_TAG)
def test_prove_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of Megatron's tests, without the search for the findings' smallest flags."""
    monkeypatch.setenv("MEGATRON_LM", str(existing(MAIN_TAG)))
    options = f"--part {CORPUS} --no-findings --date {DATE}"
    run(tmp_path, "prove_corpus", options)
    lines = (tmp_path / "results" / f"{DATE}-prove-corpus.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in lines} == {"equal"}
    assert "Not complete" not in (tmp_path / "prove_corpus.md").read_text()


CORPUS = "gpt/gpt3_mcore_te_tp1_pp4_disable_bias_linear"


PAGES = (
    *("emulated-pipeline", "executor-overhead", "replan", "offload", "vocabulary", "schedules"),
    *("vocabulary-run", "overlap-run", "adaptive", "lengths"),
    *("step_lengths", "slices-run"),
)


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_what_their_results_say(name: str, tmp_path: Path) -> None:
    """There is one file of results of each, and the page is of it."""
    results = ROOT / "benchmarks" / "results"
    (path,) = results.glob(f"????-??-??-{name}.json")
    (tmp_path / "results").symlink_to(results)  # offload has a section of other results
    script = name.replace("-", "_")
    command = [sys.executable, "-m", f"benchmarks.{script}", "--page-of", str(path)]
    subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, timeout=PATIENCE
    )
    assert (tmp_path / f"{script}.md").read_text() == (
        ROOT / "benchmarks" / f"{script}.md"
    ).read_text()
