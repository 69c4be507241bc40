"""Changes one operator of a source file at a time, and lists what the fitting tests do not notice.

    python -m scripts.mutants megatron_ext/moe/plan.py          twelve random changes of one file
    python -m scripts.mutants --count 4 --seed 7 megatron_ext/moe megatron_ext/offload
    python -m scripts.mutants --again report.jsonl              the changes of an earlier report

A change is of a comparison, an arithmetic operator, min or max, ``and`` or ``or``, a ``not``, or an
integer (plus or minus one); what only annotates, decorates, asserts or words a message stays. Tests
run in a copy of the repository, in processes forked from this one, which has imported what takes
long and nothing of ours: first those that name the module, then those that ``FITTING`` has for its
folder, each time until one fails. Prints a JSON line a change, then what survived; the exit status
is 1 if any did. A survivor shows a missing test, or a change without effect.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [f"megatron_ext/{x}" for x in ("schedule", "runtime", "offload", "moe", "integration")]
# Tests that run together, one such group after the other.
FITTING = {
    "megatron_ext": ("tests/unit",),
    "megatron_ext/schedule": (
        "tests/unit/schedule",
        "tests/ranks/schedule tests/ranks/runtime tests/ranks/offload",
        "tests/unit/plan tests/unit/cli",
    ),
    "megatron_ext/plan": ("tests/unit/plan", "tests/unit/cli"),
    "megatron_ext/runtime": (
        "tests/ranks/runtime",
        "tests/megatron/test_wgrad_split.py tests/megatron/test_numerics.py",
    ),
    "megatron_ext/offload": ("tests/ranks/offload", "tests/megatron/test_offload.py"),
    "megatron_ext/moe": ("tests/unit/moe tests/ranks/moe", "tests/megatron/test_moe.py"),
    "megatron_ext/integration": ("tests/megatron", "tests/checkout"),
}
HEAVY = ("torch", "torch.distributed", "megatron.core.models.gpt")
OTHERS: dict[type, Sequence[type]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,), ast.Div: (ast.Mult,), ast.Mod: (ast.FloorDiv,),
}  # fmt: skip


class Change(NamedTuple):
    """``was`` becomes ``now``, at a line and column (in bytes) of a file."""

    file: str
    was: str
    now: str
    line: int = 1
    column: int = 0

    def apply(self, source: bytes) -> bytes:
        """The changed source.

        Raises:
            ValueError: ``was`` is not there, nor at one other place alone.
        """
        was = self.was.encode()
        at = sum(map(len, source.splitlines(True)[: self.line - 1])) + self.column
        if not source.startswith(was, at):
            if source.count(was) != 1:
                raise ValueError(f"{self.file} has {self.was!r} {source.count(was)} times")
            at = source.index(was)
        return source[:at] + self.now.encode() + source[at + len(was) :]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What may be changed."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, (ast.JoinedStr, ast.Assert)):
                yield node
                yield from _nodes(node)


def _others(node: Any) -> Iterator[ast.AST]:
    """What a node may become."""

    def but(**fields: Any) -> Any:
        changed = copy.copy(node)
        changed.__dict__.update(fields)
        return changed

    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for kind in OTHERS[type(operator)]:
                yield but(ops=[*node.ops[:i], kind(), *node.ops[i + 1 :]])
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        yield from (but(op=kind()) for kind in OTHERS.get(type(node.op), ()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (but(value=node.value + by) for by in (1, -1))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max"):
        yield but(func=ast.Name("max" if node.func.id == "min" else "min"))


def changes(root: Path, file: str) -> list[list[Change]]:
    """All changes of a file, those of one operator together."""
    source, found = (root / file).read_bytes(), []
    starts = [0, *accumulate(map(len, source.splitlines(True)))]
    for node in _nodes(ast.parse(source)):
        others = list(_others(node))
        if others:
            at: Any = node  # has a place, as everything has that may be changed
            end = starts[at.end_lineno - 1] + at.end_col_offset
            was = source[starts[at.lineno - 1] + at.col_offset : end].decode()
            text = "{}" if isinstance(node, ast.stmt) else "({})"
            new = [text.format(ast.unparse(other)) for other in others]
            found.append([Change(file, was, now, at.lineno, at.col_offset) for now in new])
    return found


def chosen(root: Path, paths: Sequence[str], count: int, seed: int) -> list[Change]:
    """``count`` changes of each file or folder, of different operators."""
    rng, found = random.Random(seed), []
    for path in paths:
        files = sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
        places = [some for f in files for some in changes(root, str(f.relative_to(root)))]
        found += [rng.choice(some) for some in rng.sample(places, min(count, len(places)))]
    return found


def fitting(root: Path, file: str) -> list[str]:
    """Groups of tests for a file, that which is likely to notice first."""
    path = Path(file).with_suffix("")
    folder = next((str(p) for p in path.parents if str(p) in FITTING), "megatron_ext")
    if "features" in path.parts:  # tests name a feature, not its modules
        path = Path(*path.parts[: path.parts.index("features") + 2])
    path = path.parent if path.name == "__init__" else path
    parent, name = re.escape(".".join(path.parts[:-1])), path.name
    named = re.compile(rf"\b{parent}(\.{name}\b| import .*\b{name}\b)")
    mapped, first = tuple(" ".join(FITTING[folder]).split()), []
    for test in (root / "tests").rglob("test_*.py"):
        where = str(test.relative_to(root))
        alike = name in test.stem and where.startswith(mapped)
        if "campaigns" not in where and (alike or named.search(test.read_text())):
            first.append((test.stat().st_size, where))  # few tests are quick tests
    return [" ".join(where for _, where in sorted(first))] * bool(first) + [*FITTING[folder]]


class Runner:
    """Runs tests on changed sources.

    Args:
        root: a repository, which is copied and stays as it is.
        folder: for the copy.
        limit_s: how long the tests of one change may take, all together.
    """

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self.root, self.copy, self.limit_s = root, folder / "copy", limit_s
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", ".*_cache")
        shutil.copytree(root, self.copy, symlinks=True, ignore=ignored)
        self._answer, self._log = folder / "answer", folder / "log"
        self._unchanged: dict[str, str] = {}  # by group, what fails without a change
        self._number = 0

    def judge(self, change: Change, groups: Sequence[str]) -> tuple[str, str]:
        """``caught``, ``survived``, ``slow`` or ``unjudged``; and the test that failed, or why."""
        ends, path = time.monotonic() + self.limit_s, self.copy / change.file
        before = path.read_bytes()
        after = change.apply(before)
        for group in groups:
            self._write(path, after)
            try:
                failed = self._run(group, ends)
            finally:
                self._write(path, before)
            if failed is None:
                return "slow", f"no answer in {self.limit_s:g} s of {group}"
            if group not in self._unchanged:
                self._unchanged[group] = failed and (self._run(group) or "")
            if self._unchanged[group]:
                return "unjudged", f"{self._unchanged[group]} fails without a change"
            if failed:
                return "caught", failed
        return "survived", ""

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        self._number += 1  # byte code is taken for that of a source of its size and second
        os.utime(path, (self._number, self._number))

    def _run(self, group: str, ends: float = float("inf")) -> str | None:
        """The first test that fails, empty if none does; None if ``ends`` comes first."""
        self._answer.write_text("")
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._child(shlex.split(group))
        done = 0, 0
        try:
            while not (done := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > ends:
                    return None
                time.sleep(0.05)
        finally:
            if not done[0]:  # also where this process is ended
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(done[1])
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"no tests in {group}:\n{self._log.read_text()}")
        return (self._answer.read_text() or f"exit status {status}") if status else ""

    def _child(self, tests: list[str]) -> NoReturn:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.copy)
            os.environ["PYTHONPATH"] = str(self.copy)
            sys.path[:] = [str(self.copy), *(p for p in sys.path if p not in ("", str(self.root)))]
            for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
                del sys.modules[name]
            options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
            status = pytest.main([*options, *tests], plugins=[_First(self._answer)])
        finally:
            os._exit(status)


class _First:
    """Writes down the first test that fails."""

    def __init__(self, answer: Path) -> None:
        self._answer = answer

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See pytest."""
        if report.failed and not self._answer.read_text():
            self._answer.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def _judged(root: Path, found: dict[Change, list[str]], limit_s: float) -> list[str]:
    """A line of text for each change that was not caught; prints one of JSON for each."""
    left = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(root, Path(folder), limit_s)
        for change, groups in found.items():
            began = time.monotonic()
            outcome, why = runner.judge(change, groups)
            seconds = round(time.monotonic() - began, 1)
            said = {"outcome": outcome, "why": why, "seconds": seconds}
            print(json.dumps({**change._asdict(), **said}), flush=True)
            if outcome != "caught":
                place = f"{change.file}:{change.line}"
                left.append(f"{outcome:8}  {place}  {change.was}  ->  {change.now}  {why}".rstrip())
    return left


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the changes asked for; 1 if any was not caught."""
    parser = argparse.ArgumentParser(prog="scripts.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=FOLDERS, metavar="FILE_OR_FOLDER")
    parser.add_argument("--count", type=int, default=12, help="changes of each path")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--again", type=Path, metavar="REPORT", help="those of these JSON lines")
    parser.add_argument("--tests", help="one group of files or folders, for the fitting ones")
    parser.add_argument("--limit", type=float, default=900, help="seconds a change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    given = parser.parse_args(argv)
    root = given.root.resolve()
    if given.again is None:
        found = dict.fromkeys(chosen(root, given.paths, given.count, given.seed))
    else:  # a line may name its tests
        words = [json.loads(x) for x in given.again.read_text().splitlines() if x[:1] == "{"]
        found = {
            Change(**{k: x[k] for k in Change._fields if k in x}): x.get("tests") for x in words
        }
    asked = {c: given.tests or tests for c, tests in found.items()}
    groups = {c: [tests] if tests else fitting(root, c.file) for c, tests in asked.items()}
    os.environ["OMP_NUM_THREADS"] = "1"  # see tests/conftest.py
    text = " ".join(test for some in groups.values() for test in some)
    for name in HEAVY if re.search("tests/(ranks|megatron|checkout)", text) else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what runs
    left = _judged(root, groups, given.limit)
    print(f"\n{len(groups) - len(left)} of {len(groups)} changes caught", *left, sep="\n")
    return bool(left)


if __name__ == "__main__":
    raise SystemExit(main())
