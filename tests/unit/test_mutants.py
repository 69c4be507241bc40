"""``scripts.mutants``: which changes it makes, and what it says of a caught and of another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import FITTING, FOLDERS, Change, changes, chosen, fitting
from tests.support import ROOT

SOURCE = """def least(a: int, b: int) -> int:
    return min(a, b)


def more(n: int) -> int:
    return n + 1
"""
TEST = """import sample


def test_least():
    assert sample.least(1, 2) == 1
    assert sample.more(0) < 2
"""


def test_one_caught_and_one_survivor(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SOURCE)
    (tmp_path / "test_sample.py").write_text(TEST)
    asked = [{"file": "sample.py", "was": "min(a, b)", "now": "max(a, b)"}]
    asked.append({"file": "sample.py", "was": "n + 1", "now": "n - 1"})
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    words = "sample.py --tests test_sample.py --again asked.jsonl --root ."
    # One that runs inside of another pytest.
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.mutants", *words.split()],
        cwd=tmp_path,
        env={**quiet, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    *lines, empty, count, survivor = done.stdout.splitlines()
    caught, other = map(json.loads, lines)
    assert (caught["outcome"], caught["why"]) == ("caught", "test_sample.py::test_least")
    assert other["outcome"] == "survived"
    assert (empty, count) == ("", "1 of 2 changes caught")
    assert survivor == "survived  sample.py:1  n + 1  ->  n - 1"
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "sample.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("a < b", ["(a <= b)", "(a >= b)"]),
        ("a == b != c", ["(a != b != c)", "(a == b == c)"]),
        ("x is y", ["(x is not y)"]),
        ("x += y", ["x -= y"]),
        ("a // b", ["(a * b)"]),
        ("a and b", ["(a or b)"]),
        ("not a", ["(a)"]),
        ("a[7]", ["(8)", "(6)"]),
        ("max(a)", ["(min(a))"]),
        ("x: Literal[3] = f'{a + b}'", []),
        ("assert a < b", []),
        ("True", []),
    ],
)
def test_changes(tmp_path: Path, was: str, now: list[str]) -> None:
    (tmp_path / "one.py").write_text(was)
    assert [change.now for some in changes(tmp_path, "one.py") for change in some] == now


def test_a_change_is_of_bytes_at_its_place_or_of_the_only_such_text() -> None:
    source = "é = b + b\né(b)".encode()
    assert Change("x.py", "b", "(c)", 1, 9).apply(source) == "é = b + (c)\né(b)".encode()
    assert Change("x.py", "(b)", "()").apply(source) == "é = b + b\né()".encode()
    with pytest.raises(ValueError, match="x.py has 'b' 3 times"):
        Change("x.py", "b", "(d)", 2, 0).apply(source)


def test_a_seed_chooses_the_same_changes_and_fitting_tests_exist() -> None:
    some = ["megatron_ext/moe", "megatron_ext/cli.py"]
    found = chosen(ROOT, some, 3, seed=1)
    assert found == chosen(ROOT, some, 3, seed=1) != chosen(ROOT, some, 3, seed=2)
    assert [change.file.startswith(path) for path in some for change in found].count(True) == 6
    for change in found:
        source = (ROOT / change.file).read_bytes()
        compile(change.apply(source), change.file, "exec")
        assert change.apply(source) != source
    groups = [group for some in FITTING.values() for group in some]
    groups += fitting(ROOT, "megatron_ext/integration/features/moe/flex.py")
    assert any("tests/megatron/test_moe_flex.py" in group for group in groups)
    paths = [*FOLDERS, *(test for group in groups for test in group.split())]
    assert all((ROOT / path).exists() for path in paths)


def test_what_nightly_tests_change_is_still_there() -> None:
    """Or they end with an error, and no change is made."""
    lines = (ROOT / "tests" / "campaigns" / "mutants.jsonl").read_text().splitlines()
    assert len(lines) >= 22
    for line in lines:
        given = json.loads(line)
        tests = given.pop("tests")
        change = Change(**given)
        source = (ROOT / change.file).read_bytes()
        compile(change.apply(source), change.file, "exec")
        assert (ROOT / tests.split()[0]).exists()
