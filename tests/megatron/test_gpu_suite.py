"""``benchmarks/gpu`` on the CPU with next to nothing to compute: it starts on a bare machine, says
what is wrong, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE

DATE = "2026-01-02"


def _run(root: Path, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        **{"cwd": root, **more},
    )


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results" / f"{DATE}-gpu-tiny.json").read_text())
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed megatron-core as a wheel of another version."""
    folder = tmp_path_factory.mktemp("wheels")
    installed = distribution("megatron-core")
    assert installed.files is not None
    with zipfile.ZipFile(folder / "megatron_core-0-py3-none-any.whl", "w") as wheel:
        for file in installed.files:
            if ".." in file.parts:
                continue
            data = Path(str(file.locate())).read_bytes()
            if file.suffix == ".pyc":  # saves every process seconds: valid whatever the file's time
                data = data[:4] + (1).to_bytes(4, "little") + bytes(8) + data[16:]
            if file.name == "METADATA":
                mine = f"Version: {installed.version}\n".encode()
                data = data.replace(mine, mine.replace(b"\n", b"+wheel\n"))
            wheel.writestr(str(file), data)
    return folder


def _bare(root: Path, wheels: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script as on a machine that has nothing: another folder, no PYTHONPATH."""
    script = str(root / "benchmarks" / "gpu" / "bare.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [script, str(wheels), str(out), "--tiny", "--date", DATE, *options]
    return _run(root, *words, cwd=wheels, env=environment)


@pytest.fixture(scope="module")
def whole(repo_root: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    out = tmp_path_factory.mktemp("out")
    done = _bare(repo_root, wheels, out)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return out


def test_parts_end_from_a_wheel(repo_root: Path, wheels: Path, tmp_path: Path) -> None:
    """Those of single processes that take seconds; all others at night."""
    parts = "rates", "slices", "layers", "wide"
    done = _bare(repo_root, wheels, tmp_path, "--parts", ",".join(parts))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = _results(tmp_path)
    assert found["megatron"] == f"{version('megatron-core')}+wheel"
    assert tuple(found["rows"]) == parts
    _check_single(found["rows"])
    assert "**No GPU figure exists yet.**" in (tmp_path / "gpu.md").read_text()


def _check_single(parts: dict[str, Any]) -> None:
    """What holds of the parts of single processes."""
    assert not any("failed" in part for part in parts.values())
    wide = parts["wide"]["rows"]
    assert all(row["size"]["hidden"] == 128 for row in wide)
    assert all(row["peak_sets"] == row["planned_sets"] for row in wide)
    assert parts["rates"]["gb_per_s"]["to_host"] > 0
    slices = parts["slices"]["rows"]
    assert [len(row["lengths"]) for row in slices] == [1, 1, 2, 2, 4, 4]
    assert all(0 < row["difference"] < 0.02 for row in slices[2:])
    assert list(parts["layers"]["rows"][0]["passes"]) == ["F", "B", "W"]


@pytest.mark.matrix
def test_all_parts_end_from_a_wheel(whole: Path) -> None:
    """What is exact is exact on the CPU, too."""
    found = _results(whole)
    assert found["megatron"] == f"{version('megatron-core')}+wheel"
    parts = found["rows"]
    assert list(parts) == [
        "tests", "shared", "replay", "rates", "slices", "overhead", "moe", "layers", "wide", "nccl"
    ]  # fmt: skip
    _check_single(parts)
    assert parts["tests"]["passed"] + parts["tests"]["skipped"] > 20
    assert not parts["tests"]["failures"]
    replay = parts["replay"]["rows"]
    assert not [row for row in replay if "failed" in row]
    assert all(row["peak_sets"] == row["planned_sets"] for row in replay)
    assert [row["moved_sets"] > 0 for row in replay] == [False] * 6 + [True] * 2
    for world in parts["shared"]["worlds"].values():
        assert world["learns"]
        assert all(row["equal"] and row["deterministic"] for row in world["rows"])
        assert [row["control"] for row in world["rows"]][:3] == [False, True, False]
        assert sum(row["moved_sets"] > 0 for row in world["rows"]) == 3
    ways = [row["way"] for row in parts["moe"]["rows"]]
    assert ways[:2] == ["stock", "recompute"] and len(ways) == len(set(ways)) >= 10
    assert {row["strategy"] for row in parts["moe"]["rows"]} >= {"none", "s1", "s2", "s3", "s4"}
    assert parts["overhead"]["graphs"] == [
        {"way": "local CUDA graphs", "skipped": "no CUDA device"}
    ]
    assert "| local CUDA graphs | no CUDA device |" in (whole / "gpu.md").read_text()
    nccl = parts["nccl"]
    assert [row["schedule"] for row in nccl["schedules"]] == [
        "1f1b", "1f1b", "interleaved", "zb-h1", "v-half", "v-zb"
    ]  # fmt: skip
    assert all(row["equal"] and row["deterministic"] for row in nccl["schedules"])
    assert nccl["backend"] == "gloo" and len(nccl["messages"]) == len(nccl["computing"]) == 7
    assert [row["messages"] for row in nccl["held"]] == [0.0] * 6  # no allocator of a GPU
    assert [row["steps"] for row in nccl["memory"]] == [3]
    assert "**No GPU figure exists yet.**" in (whole / "gpu.md").read_text()


@pytest.mark.matrix
def test_a_second_run_does_the_rest(repo_root: Path, wheels: Path, whole: Path) -> None:
    """A part without a result, or with half of one, and no other."""
    path = whole / "results" / f"{DATE}-gpu-tiny.json"
    before = _results(whole)
    first = before["rows"].pop("rates")
    before["rows"]["replay"]["unfinished"] = "not done after 1 s"
    path.write_text(json.dumps(before))
    done = _bare(repo_root, wheels, whole, "--parts", "rates,shared", "--date", "2026-01-03")
    assert done.returncode == 1 and "shared: " not in done.stdout.split("# One GPU")[0]
    after = _results(whole)["rows"]
    assert after["rates"].keys() == first.keys()
    assert after["replay"]["unfinished"] == "not done after 1 s"  # was not asked for
    assert "- replay: not done after 1 s" in (whole / "gpu.md").read_text()


def test_a_wheel_is_needed(repo_root: Path, tmp_path: Path) -> None:
    done = _bare(repo_root, tmp_path, tmp_path)
    assert done.returncode == 2 and "has 0 wheels of megatron-core" in done.stderr


@pytest.mark.matrix  # it imports torch and Megatron four times
def test_parts_start_where_there_is_a_gpu(repo_root: Path, tmp_path: Path) -> None:
    """There they are no forks but new processes, and so are their ranks: all find the suite."""
    code = f"""
import argparse, pathlib
from benchmarks.gpu import run
run.device = lambda: {{"gpu": "one that a test made up"}}
args = argparse.Namespace(tiny=True, output=pathlib.Path({str(tmp_path)!r}), date="{DATE}")
assert run.run_part("rates", args)["gb_per_s"]["to_host"] > 0
from benchmarks.gpu import keep, shared
args.into = args.output / "ranks"
assert shared._processes("benchmarks.gpu.shared", 2, args, {str(tmp_path)!r})
assert len(keep.kept(args.into)["worlds"]["2"]["rows"]) == len(shared.CASES)
"""
    done = _run(repo_root, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _below(pid: int) -> set[int]:
    """Its children, theirs, and so on."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found |= {child} | _below(child)
    return found


@pytest.mark.matrix
def test_a_killed_run_keeps_what_it_has(repo_root: Path, wheels: Path, tmp_path: Path) -> None:
    """Ended in the middle of the second part: the first is in the results, of the second there is
    a file, and no process is left."""
    command = [sys.executable, str(repo_root / "benchmarks" / "gpu" / "bare.py"), str(wheels)]
    command += [str(tmp_path), "--tiny", "--parts", "rates,shared", "--date", DATE]
    with subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            if line.startswith("2 processes: "):
                break
        others = _below(suite.pid)
        suite.terminate()
        status = suite.wait(PATIENCE)
        left = [pid for pid in others if _alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert len(others) >= 4 and not left
    assert status == 128 + signal.SIGTERM
    assert list(_results(tmp_path)["rows"]) == ["rates"]
    assert "## Transfers" in (tmp_path / "gpu.md").read_text()
    part = json.loads((tmp_path / "results" / f"{DATE}-gpu-tiny-shared.part").read_text())
    assert part["worlds"]["2"]["rows"][0]["equal"]


@pytest.fixture(scope="module")
def broken_parts(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What parts give that are broken on purpose, and what is wrong with them."""
    out = str(tmp_path_factory.mktemp("broken"))
    code = f"""
import argparse, json, pathlib, random, sys, time
from benchmarks.gpu import nccl, run, shared
from benchmarks.gpu.model import ways
from benchmarks.gpu.page import wrong
from megatron_ext.schedule import generate
import torch
unknown = [name for name, chunks, _ in shared.CASES
           if not generate(name, 4, 8, chunks).placement.edges <= ways(4)]
run.device = lambda: {{"gpu": None}}  # forks, to which all of this holds
class Broken:
    def run(args): raise ValueError("broken")
class Endless:
    def run(args):
        args.keep({{"rows": [1]}})
        time.sleep(1000)
sys.modules["broken"], sys.modules["endless"] = Broken, Endless
run.PARTS.update(broken=("broken", 60), endless=("endless", 1))
nccl.SCHEDULES, nccl.WAYS = nccl.SCHEDULES[:2], nccl.WAYS[:1]
nccl.held = Broken.run
def chance(rank, learn=shared.learn):
    learn(rank)
    with torch.no_grad():
        next(rank.chunks[0].parameters()).add_(random.SystemRandom().random())
shared.learn, shared.CASES = chance, shared.CASES[:4]
args = argparse.Namespace(tiny=True, output=pathlib.Path({out!r}), date="{DATE}")
found = {{name: run.run_part(name, args) for name in ("broken", "endless", "nccl", "shared")}}
found.update(wrong=wrong(found), unknown=unknown)
pathlib.Path({out!r}, "found.json").write_text(json.dumps(found))
"""
    done = _run(repo_root, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(Path(out, "found.json").read_text())
    return found


@pytest.mark.matrix  # four parts of the suite for what is broken
def test_a_failure_ends_one_part_only(broken_parts: dict[str, Any]) -> None:
    """A part that dies, or takes too long, is a line, with what it had; NCCL's rows stay."""
    assert broken_parts["broken"]["failed"] == "exit status 1"
    assert broken_parts["endless"]["unfinished"] == "not done after 10 s"
    assert broken_parts["endless"]["rows"] == [1]
    nccl = broken_parts["nccl"]
    assert [len(nccl[part]) for part in ("schedules", "messages", "computing")] == [2, 1, 1]
    assert "nccl: a process failed; its traceback is in the output" in broken_parts["wrong"]


@pytest.mark.matrix
def test_chance_is_not_blamed_on_a_schedule(broken_parts: dict[str, Any]) -> None:
    """A model that computes something else every time: its control says so, and that alone."""
    rows = broken_parts["shared"]["worlds"]["2"]["rows"]
    assert [row["equal"] for row in rows] == [True, False, False, False]
    assert [text for text in broken_parts["wrong"] if text.startswith("shared")] == [
        "shared, 2 processes: 1f1b differs from itself, so nothing follows for the other schedules"
    ]


@pytest.mark.matrix
def test_messages_through_the_host_know_every_way(broken_parts: dict[str, Any]) -> None:
    """Of every schedule of the part ``shared``, at four ranks too, which no other test here has."""
    assert broken_parts["unknown"] == []


def test_the_page_says_what_is_wrong() -> None:
    """Each kind of wrong result is found; a good one is not."""
    from benchmarks.gpu.page import wrong

    size = {"hidden": 64}
    good = {"size": size, "schedule": "po", "peak_sets": 2, "planned_sets": 2}
    equal = {"schedule": "po", "equal": True, "deterministic": True, "control": False}
    worlds: dict[str, Any] = {"2": {"rows": [equal], "learns": True}}
    assert wrong({"replay": {"rows": [good]}, "shared": {"worlds": worlds}}) == []
    assert wrong({
        "moe": {"unfinished": "exit status 1"},
        "wide": {"rows": [{**good, "peak_sets": 3}]},
    }) == ["moe: exit status 1", "wide, h 64: po: 3 sets, planned 2"]  # fmt: skip
    failed = {"size": size, "schedule": "po", "failed": "no memory"}
    assert wrong({"replay": {"rows": [failed]}}) == ["replay, h 64: po: no memory"]
    other = {"rows": [{**equal, "equal": False, "deterministic": False}], "learns": False}
    assert wrong({"shared": {"worlds": {"2": other, "4": {"failed": "died"}}}}) == [
        "shared, 2 processes: torch was not asked for deterministic kernels",
        "shared, 2 processes: po differs from 1f1b",
        "shared, 2 processes: the loss never changed",
        "shared, 4 processes: died",
    ]
    graphs = {"way": "graphs", "equal": False}
    assert wrong({"overhead": {"graphs": [graphs]}}) == ["overhead, graphs: other losses"]
    assert wrong({"tests": {"failures": ["test_a: no"]}}) == ["tests: test_a: no"]
