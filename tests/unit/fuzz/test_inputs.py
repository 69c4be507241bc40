"""Whatever a user gives us is used or refused with one sentence.

A fast part of tests/campaigns/fuzz.py. Readers that import torch: tests/ranks/fuzz.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext._input import fraction, parse_json, read_text, shown
from megatron_ext.cli import main
from megatron_ext.schedule import NAMES, Costs, ScheduleError, check, generate
from megatron_ext.schedule.costs import with_stage_file
from megatron_ext.schedule.io import load, save
from tests.support.fuzz_checks import (
    FAST,
    check_documents,
    check_flag_values,
    check_mutations,
    code_that_leaves,
)
from tests.support.fuzz_inputs import Fault, Target, bare_targets, feed, sentence
from tests.support.waiting import PATIENCE

TARGETS = bare_targets()
JSON = [name for name in TARGETS if name not in ("traces", "flags", "pickle")]


@pytest.mark.parametrize("name", JSON)
def test_documents(name: str) -> None:
    check_documents(TARGETS[name])


@pytest.mark.parametrize("flag", ["cost", "cap", "bytes", "time", "layout", "line"])
def test_flag_values(flag: str) -> None:
    check_flag_values(TARGETS["flags"], f"{flag}\n")


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    check_mutations(TARGETS[name])


@FAST
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 7))
def test_files_hold_the_schedule(name: str, pp: int, m: int) -> None:
    import tempfile

    schedule = generate(name, pp, m)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.json")
        save(schedule, path)
        again = load(path)
    assert again.ranks == schedule.ranks
    assert again.placement == schedule.placement
    assert again.fingerprint() == schedule.fingerprint()


def _valid() -> dict[str, Any]:
    return generate("1f1b", 2, 2).to_json()


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (load, '{"format": "megatron-ext-schedule/1", "pp": 1000000000, "chunks": 1, '
         '"microbatches": 1000000000, "placement": [[0], [1]], "ranks": [["F0.0"], ["F1.0"]]}'),
        (load, json.dumps({**_valid(), "microbatches": 10**9})),
        (load, json.dumps({**_valid(), "cost": {"hop": "1e999999999"}})),
        (partial(with_stage_file, Costs()), '{"stages": [["1e-999999999", 1, 1]]}'),
    ],
)  # fmt: skip
def test_huge_claims_cost_nothing(read: Callable[[str], Any], text: str, tmp_path: Path) -> None:
    """What a file says it holds is compared with what it holds before anything is allocated."""
    path = tmp_path / "claim.json"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            check(read(str(path)))
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sentence(str(error.value))
    assert used < 8 << 20


def test_endless_files_are_read_to_the_limit() -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero")
    with pytest.raises(ScheduleError, match="more than the 64 MiB"):
        load("/dev/zero")


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    """Text that is code to Python, YAML, pickle or a shell stays text."""
    mark = tmp_path / "mark"
    for text in code_that_leaves(mark):
        for target in TARGETS.values():
            if target.name == "flags":
                for flag in ("cost", "cap", "bytes", "time", "layout", "line"):
                    assert not feed(target, f"{flag}\n{text}".encode())
            else:
                assert not feed(target, text.encode())
                assert not feed(target, json.dumps({"format": text, "ranks": text}).encode())
    assert not mark.exists()


def test_readers_of_numbers_and_json(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "NaN", "[Infinity]", "", "1" * 5000):
        with pytest.raises(ValueError) as error:
            parse_json(text)
        sentence(str(error.value))
    for number in (
        "1e9999999",
        "-1e-9999999",
        "1/0",
        "9" * 61,
        "1e101",
        "x",
        float("nan"),
        True,
        "1e1_000_000",
        "1_0",
        "١",
    ):
        with pytest.raises(ValueError):
            fraction(number)
    assert fraction("1/3") * 3 == 1 and fraction(0.1) * 10 == 1 and fraction("1e-3") * 1000 == 1
    assert len(shown([["x" * 10**6] * 1000] * 1000)) < 1000
    path = tmp_path / "text"
    path.write_bytes(b"12345")
    assert read_text(path, most_bytes=5) == "12345"
    with pytest.raises(ValueError, match="more than"):
        read_text(path, most_bytes=4)


def test_a_name_cannot_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.json"
    for name in ("\x1b[2J", "a\nmegatron_ext: all is well", "x" * 5000):
        path.write_text(json.dumps({**_valid(), "name": name}))
        assert main(["simulate", "--schedule", str(path)]) == 2
        captured = capsys.readouterr()
        assert "\x1b" not in captured.err
        assert len(captured.err.splitlines()) == 1


def test_the_rule_itself() -> None:
    """Guards the tests above: what is no sentence, or no ValueError, is seen."""
    for text in ("", "\n", "a\x1b[2Jb", "x" * 5000):
        with pytest.raises(Fault):
            sentence(text)

    def crash(data: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        feed(Target("crash", (), crash), b"")


@pytest.mark.matrix
def test_the_long_run(tmp_path: Path, repo_root: Path) -> None:
    """The campaign counts, repeats by its seed, and ends with status 0 where all is well."""
    answers = []
    for turn in range(2):
        result = tmp_path / f"{turn}.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.campaigns.fuzz"),
                *("--inputs", "100", "--targets", "schedule,flags"),
                *("--faults", str(tmp_path / "faults"), "--json", str(result)),
            ],
            cwd=repo_root,
            env=dict(os.environ, PYTHONPATH=str(repo_root)),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers.append(json.loads(result.read_text()))
    assert answers[0]["accepted"] == answers[1]["accepted"]
    assert sum(answers[0]["inputs"].values()) >= 100
    assert answers[0]["faults"] == {}
