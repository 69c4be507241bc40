"""Runs of pytest in forked workers report what a run in one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

CONFTEST = """
import os
import pytest
from tests.support import workers

def pytest_configure(config):
    workers.plugin(config, 3)

@pytest.fixture(scope="session", autouse=True)
def kept():
    yield
    with open(os.environ["ENDED"], "a") as log:
        log.write(f"{os.getpid()}\\n")
"""
TESTS = """
import os, sys, warnings
import pytest

@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    made = tmp_path_factory.mktemp("made") / "pid"
    made.write_text(str(os.getpid()))
    return made

@pytest.mark.parametrize("number", range(3))
def test_a_file_has_one_worker(made_once, number):
    assert made_once.read_text() == str(os.getpid())

def test_fails():
    print("printed by it")
    assert 1 == 2

def test_warns():
    warnings.warn("a warning of it")

@pytest.mark.skip(reason="left out")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError("in its fixture")

def test_errs(broken):
    pass
"""


def _run(folder: Path, tests: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENDED": str(folder / "ended")}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    """Outcomes, output, warnings, errors of fixtures; fixtures end once in every worker."""
    done = _run(tmp_path, dict.fromkeys("abcde", TESTS))
    assert done.returncode == 1
    assert re.search(r"5 failed, 20 passed, 5 skipped, 5 warnings, 5 errors in", done.stdout)
    for word in ("printed by it", "a warning of it", "ValueError: in its fixture", "left out"):
        assert word in done.stdout
    assert done.stdout.count("PASSED test_a.py::") == 4
    ended = (tmp_path / "ended").read_text().split()
    assert len(set(ended)) == len(ended) == 3


def test_a_worker_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    """The tests after it run in another worker."""
    text = TESTS + "\ndef test_dies():\n    os._exit(7)\n\ndef test_after():\n    pass\n"
    done = _run(tmp_path, {"a": text, "b": TESTS})
    assert done.returncode == 1
    assert "3 failed, 9 passed, 2 skipped" in done.stdout
    assert "the process that ran this test ended, with exit status 7" in done.stdout
    assert "PASSED test_a.py::test_after" in done.stdout


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    """``-x``: no worker is left, and most tests have not run."""
    slow = "import time\ndef test_waits():\n    time.sleep(600)\n"
    done = _run(tmp_path, {"a": "def test_fails():\n    assert False\n", "b": slow}, "-x")
    assert done.returncode == 1
    assert "1 failed in" in done.stdout
