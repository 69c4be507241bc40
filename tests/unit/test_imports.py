"""What may import what, as one table, and how large and documented things must be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "megatron_ext"

_TOOLS = {"_input", "_conflict", "schedule", "plan", "view"}
_ENGINE = {"runtime", "offload", "moe"}
_ALL = _TOOLS | _ENGINE | {"integration", "cpu", "commands", "cli", "launch", "patching"}
_ALL |= {"_log", "_terminal", "checkpoints", "prove", "releases", "reproduce"}

# room -> (rooms of this package it may import, packages besides the standard library it may).
RULES: dict[str, tuple[set[str], set[str]]] = {
    "_input": (set(), set()),
    "_conflict": ({"_input"}, set()),
    "_log": (set(), set()),
    "_terminal": (set(), set()),
    "schedule": ({"_input", "schedule"}, set()),
    "plan": ({"_input", "_conflict", "schedule", "plan"}, {"numpy"}),
    # The plans of MoE layers, so that what is planned is what runs.
    **dict.fromkeys(
        ("plan/moe_bounds.py", "plan/moe_job.py", "plan/moe_layer.py", "plan/moe_times.py"),
        ({"_input", "_conflict", "plan", "moe"}, set()),
    ),
    "view": ({"_input", "_terminal", "schedule", "view"}, set()),
    "reproduce": (_TOOLS | {"moe", "reproduce"}, set()),
    "runtime": (_TOOLS | _ENGINE, {"torch"}),
    "offload": (_TOOLS | _ENGINE, {"torch", "numpy"}),
    "moe": (_TOOLS | _ENGINE, {"torch"}),
    "integration": (
        _TOOLS | _ENGINE | {"_log", "integration", "checkpoints", "patching", "releases"},
        # Apex' kernel, which Megatron's own linear layers use where it is installed.
        {"torch", "megatron", "fused_weight_gradient_mlp_cuda"},
    ),
    "cpu": ({"cpu", "runtime"}, {"torch", "megatron", "numpy"}),
    "checkpoints": ({"_input", "schedule", "checkpoints"}, set()),
    "prove": (
        {"_input", "cpu", "integration", "launch", "offload", "prove"},
        {"torch", "megatron"},
    ),
    "commands": (_ALL, set()),
    "releases": (set(), set()),
    "patching": ({"releases"}, set()),
    "cli": (_ALL, set()),
    "launch": (_ALL, {"torch", "megatron"}),
    # Only when an order is optimized.
    "schedule/optimize_window.py": ({"_input", "schedule"}, {"ortools"}),
    # Only ever run as a program of its own.
    "commands/doctor/probe.py": (_ALL, {"torch", "megatron"}),
    "__main__": (_ALL, set()),
    "__init__": (_ALL, set()),
}

# Rooms whose modules load neither torch nor numpy nor megatron, not even indirectly.
BARE = ["schedule", "view", "plan", "reproduce", "checkpoints", "commands"]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_CLASS_LINES = 250
MAX_ATTRIBUTES = 12  # that methods of a class assign to ``self``
MAX_IMPORTS = 12  # modules of this package that one module imports

FILES = sorted(PACKAGE.rglob("*.py"))
_ids = [str(path.relative_to(PACKAGE)) for path in FILES]


def _room(path: Path) -> str:
    name = path.relative_to(PACKAGE).as_posix()
    return name if name in RULES else name.split("/")[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file imports, inside functions too.

    ``from x import y`` counts as ``x.y``: y may be a module.
    """
    package = ("megatron_ext", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name])


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_imports_go_one_way(path):
    rooms, outside = RULES[_room(path)]
    for line, name in _imports(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if top == "megatron_ext":
            # Names of the package itself, such as __version__, are nobody's room.
            if rest and rest[0] in _ALL:
                assert rest[0] in rooms, f"{where}; {_room(path)} may import {sorted(rooms)}"
        else:
            allowed = outside | set(sys.stdlib_module_names)
            assert top in allowed, f"{where}; {_room(path)} may import {sorted(outside)}"


FEATURES = PACKAGE / "integration" / "features"


@pytest.mark.parametrize(
    "path", sorted(FEATURES.rglob("*.py")), ids=lambda p: str(p.relative_to(FEATURES))
)
def test_features_do_not_import_each_other(path):
    """The list of them aside; what two need is a module of ``integration``."""
    own = path.relative_to(FEATURES).parts[0].removesuffix(".py")
    for line, name in _imports(path):
        parts = name.split(".")
        if parts[:3] == ["megatron_ext", "integration", "features"] and own != "__init__":
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            assert parts[3] == own, f"{where}, another feature"


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_files_are_documented_and_small(path):
    text = path.read_text()
    tree = ast.parse(text)
    name = path.relative_to(ROOT)
    if tree.body:
        assert ast.get_docstring(tree), f"{name} has no docstring"
    lines = len(text.splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {lines} lines"


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_classes_are_small(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            where = f"{path.relative_to(ROOT)}: {node.name}"
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_CLASS_LINES, f"{where} has {lines} lines"
            held = _attributes(node)
            assert len(held) <= MAX_ATTRIBUTES, f"{where} has {len(held)} attributes: {held}"


def _module(name: str) -> str:
    """The module that ``name``, a module or something in it, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    return name if path.with_suffix(".py").exists() or path.is_dir() else name.rpartition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_modules_import_few_others(path):
    found = {_module(name) for _, name in _imports(path) if name.startswith("megatron_ext.")}
    where = path.relative_to(ROOT)
    if where.as_posix() == "megatron_ext/integration/features/__init__.py":
        return  # the list of features, one import each
    assert len(found) <= MAX_IMPORTS, f"{where} imports {len(found)} modules: {sorted(found)}"


def test_the_table_sees_a_wrong_import(tmp_path, monkeypatch):
    """Guards the two tests above: relative, nested and plain imports are all found."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "schedule" / "generators" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n    from ...runtime import executor\n    import torch.nn\n")
    assert list(_imports(path)) == [
        (2, "megatron_ext.runtime.executor"),
        (3, "torch.nn"),
    ]
    assert _room(path) == "schedule"


def _modules(room: str) -> list[str]:
    names = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_the_bare_rooms_load_no_torch():
    """In a fresh interpreter, whatever this one has loaded; importing the package is free too."""
    modules = ["megatron_ext", "megatron_ext.cli", *(m for room in BARE for m in _modules(room))]
    assert len(modules) > 10
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) == []


def test_runs_on_a_bare_interpreter_from_the_repository_root():
    """-S: without site-packages, as on a machine with nothing installed."""
    command = [sys.executable, "-S", "-m", "megatron_ext", "simulate", "--schedule", "1f1b"]
    command += ["--pp", "4", "--microbatches", "8", "--json"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["makespan"] == 33
