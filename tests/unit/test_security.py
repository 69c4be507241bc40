"""What we run and write: nothing of a user's is evaluated, nothing of it reaches a shell.

What the runtime writes: tests/ranks/runtime/test_trace_files.py.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.releases import TAGS
from tests.support import ROOT
from tests.support.waiting import PATIENCE

SOURCES = sorted(
    path
    for part in ("megatron_ext", "scripts", "benchmarks")
    for path in (ROOT / part).rglob("*.py")
)
SHELL = sorted(p for p in (ROOT / "scripts").rglob("*") if p.suffix in (".sh", ".sbatch"))

# Calls that run what they are given, or what they read. ``load`` of torch unpickles.
EVALUATE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
EVALUATE |= {f"{m}.{f}" for m in ("pickle", "marshal", "shelve", "yaml", "dill") for f in
             ("load", "loads", "open", "unsafe_load", "Unpickler")}  # fmt: skip
# The launcher's work is to run the user's training script.
ALLOWED = {("megatron_ext/launch.py", "exec"), ("megatron_ext/launch.py", "compile")}
# Between a run and the process that it has started, over a pipe and a file without a name.


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _faults(name: str, text: str) -> list[str]:
    found = []
    for call, node in _calls(ast.parse(text)):
        if call == "torch.load" and "weights_only=True" in ast.unparse(node):
            continue  # tensors and containers, nothing else
        if call in EVALUATE and (name, call) not in ALLOWED:
            found.append(f"{name}:{node.lineno} calls {call}")
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg == "shell" and not off:
                found.append(f"{name}:{node.lineno} starts a shell")
    return found


def test_no_code_evaluates_input() -> None:
    found = [
        fault
        for path in SOURCES
        for fault in _faults(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []
    bad = "import pickle, os\npickle.load(f)\nos.system(x)\nrun(x, shell=True)\neval(x)\n"
    assert len(_faults("bad.py", bad)) == 4


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_no_script_evaluates_its_environment(path: Path) -> None:
    code = "\n".join(line.split(" #", 1)[0] for line in path.read_text().splitlines())
    code = re.sub(r"^#.*", "", code, flags=re.M)
    assert not re.search(r"(^|[;&|(\s])eval\s", code, re.M)
    # A shell, ssh or srun that is handed a string would parse a variable's value again.
    assert not re.search(r"\b(ba|da|z)?sh\s+(-\w+\s+)*-\w*c\b", code)


def _script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    "source", ["$(touch {mark})", "`touch {mark}`", "; touch {mark}", "--upload-pack=touch {mark};"]
)
def test_a_hostile_source_is_only_a_name(source: str, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    mark = tmp_path / "mark"
    done = _script(
        "get_megatron.sh",
        "core_v0.19.0",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        MEGATRON_LM_GIT=source.format(mark=mark),
    )
    assert done.returncode == 2
    assert "set MEGATRON_LM_GIT" in done.stderr
    assert not mark.exists()


def test_cdpath_leads_nowhere(tmp_path: Path) -> None:
    """An exported CDPATH makes cd go elsewhere, and print where it went."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "patches").mkdir()
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 9\nMINOR = 9\nPATCH = 9\n")
    done = subprocess.run(
        ["bash", "scripts/apply_patches.sh", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CDPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert f"patches for {' '.join(TAGS)} only" in done.stderr
