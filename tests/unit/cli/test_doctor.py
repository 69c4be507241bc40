"""``doctor`` where nothing is installed, and what it makes of hardware that this machine lacks.

On a checkout: tests/checkout/test_doctor.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.commands import doctor
from tests.support import ROOT
from tests.support.doctor import errors, run, without_gpu


@without_gpu
def test_without_torch_and_megatron() -> None:
    done = run(bare=True)
    assert (done.returncode, errors(done)) == (1, [])


def test_json_and_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    done = run("--json", "--megatron", str(tmp_path), bare=True)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["status"] == "error"
    lines = {line["name"]: line for line in data["lines"]}
    assert lines["checkout"]["level"] == "error" and lines["checkout"]["fix"]
    assert lines["megatron_ext"]["level"] == "ok"
    assert all(line["fix"] for line in data["lines"] if line["level"] != "ok")


def test_no_such_folder() -> None:
    done = run("--megatron", "/no/such/folder", bare=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "is no folder" in done.stderr


@pytest.mark.parametrize("what", ["sys.exit(3)", "os.abort()", "print('no json'); sys.exit(1)"])
def test_survives_whatever_the_probe_does(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    """torch may end the process that imports it."""
    (tmp_path / "probe.py").write_text(f"import os, sys\n{what}\n")
    monkeypatch.setattr(doctor, "PROBE", tmp_path / "probe.py")
    findings = list(doctor.diagnose(doctor.run_probe(None), None))
    assert [f.level for f in findings if f.name == "torch"] == ["error"]


def test_scripts_export_nothing_that_torch_warns_of() -> None:
    """Every rank of torch from 2.8 on would say that it is deprecated."""
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts" / "slurm").glob("*.sh")]
    assert len(scripts) > 5
    named = [path.name for path in scripts if "AVOID_RECORD_STREAMS" in path.read_text()]
    assert named == []


ENGINES = {"2.20.2": "ok", "2.1.0": "warning", "not installed": "warning"}


@pytest.mark.parametrize("version", ENGINES)
def test_what_transformer_engine_enables(version: str) -> None:
    found = list(doctor._libraries({"transformer_engine": version, "apex": "not installed"}))
    assert [one.level for one in found] == [ENGINES[version], "ok"]


def test_variables_that_work_against_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = list(doctor.diagnose({"error": "none"}, None))
    assert [one.level for one in found if one.name == "environment"] == ["warning"]


MEGATRONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"error": "ModuleNotFoundError: No module named 'megatron'"}, ["error"]),
    ({"unsupported": "0.15.0 is not supported"}, ["error"]),
    ({"untested": "", "training_error": "no megatron.training"}, ["ok", "error"]),
    ({"untested": "99.1.0 is newer. Do this", "hooks": 2, "missing": []}, ["warning", "ok"]),
    ({"untested": "", "hooks": 2, "missing": ["f is gone"]}, ["ok", "error"]),
]


@pytest.mark.parametrize(("facts", "levels"), MEGATRONS)
def test_megatrons(facts: dict[str, Any], levels: list[str]) -> None:
    found = list(doctor._megatron({"version": "0.19.2", "path": "/somewhere", **facts}, None))
    assert [one.level for one in found] == levels
    assert all(one.fix for one in found if one.level != "ok")
