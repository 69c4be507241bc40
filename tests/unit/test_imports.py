"""What may import what, as one table, and how large and documented things must be."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "megatron_ext"

_TOOLS = {"_input", "_megatron_flags", "schedule", "plan", "view"}
_ENGINE = {"runtime", "offload", "moe"}
_ALL = _TOOLS | _ENGINE | {"integration", "cpu", "commands", "cli", "launch", "patching"}
_ALL |= {"_log", "_terminal", "prove", "releases"}

# room -> (rooms of this package it may import, packages besides the standard library it may).
RULES: dict[str, tuple[set[str], set[str]]] = {
    "_input": (set(), set()),
    "_log": (set(), set()),
    "_megatron_flags": (set(), set()),
    "_terminal": (set(), set()),
    "schedule": ({"_input", "schedule"}, set()),
    "plan": ({"_input", "schedule", "plan"}, {"numpy"}),
    # The plans of MoE layers, so that what is planned is what runs.
    **dict.fromkeys(
        ("plan/moe_job.py", "plan/moe_layer.py", "plan/moe_times.py"),
        ({"_input", "plan", "moe"}, set()),
    ),
    "view": ({"_input", "_terminal", "schedule", "view"}, set()),
    "runtime": (_TOOLS | _ENGINE, {"torch"}),
    "offload": (_TOOLS | _ENGINE, {"torch", "numpy"}),
    "moe": (_TOOLS | _ENGINE, {"torch"}),
    "integration": (
        _TOOLS | _ENGINE | {"_log", "integration", "patching", "releases"},
        # Apex' kernel, which Megatron's own linear layers use where it is installed.
        {"torch", "megatron", "fused_weight_gradient_mlp_cuda"},
    ),
    "cpu": ({"cpu", "runtime"}, {"torch", "megatron", "numpy"}),
    "prove": (
        {"cpu", "integration", "launch", "plan", "prove"},
        {"torch", "megatron"},
    ),
    "commands": (_ALL, set()),
    "releases": (set(), set()),
    "patching": ({"releases"}, set()),
    "cli": (_ALL, set()),
    "launch": (_ALL, {"torch", "megatron"}),
    # Only ever run as a program of its own.
    "commands/doctor/probe.py": (_ALL, {"torch", "megatron"}),
    "__main__": (_ALL, set()),
    "__init__": (_ALL, set()),
}

# Rooms whose modules load neither torch nor numpy nor megatron, not even indirectly.
BARE = ["schedule", "view", "plan", "commands"]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_CLASS_LINES = 250
MAX_ATTRIBUTES = 12  # that methods of a class assign to ``self``
MAX_IMPORTS = 12  # modules of this package that one module imports

FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _room(path: Path) -> str:
    name = path.relative_to(PACKAGE).as_posix()
    return name if name in RULES else name.split("/")[0].removesuffix(".py")


@functools.cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file imports, inside functions too.

    ``from x import y`` counts as ``x.y``: y may be a module.
    """
    package = ("megatron_ext", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *filter(None, [node.module]))
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def test_imports_go_one_way():
    wrong = []
    for path in FILES:
        rooms, outside = RULES[_room(path)]
        for line, name in _imports(path):
            top, *rest = name.split(".")
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            # Names of the package itself, such as __version__, are nobody's room.
            if top == "megatron_ext" and rest and rest[0] in _ALL - rooms:
                wrong.append(f"{where}; {_room(path)} may import {sorted(rooms)}")
            elif top != "megatron_ext" and top not in outside | set(sys.stdlib_module_names):
                wrong.append(f"{where}; {_room(path)} may import {sorted(outside)}")
    assert not wrong


FEATURES = PACKAGE / "integration" / "features"


def test_features_do_not_import_each_other():
    """The list of them aside; what two need is a module of ``integration``."""
    wrong = []
    for path in sorted(FEATURES.rglob("*.py")):
        own = path.relative_to(FEATURES).parts[0].removesuffix(".py")
        for line, name in _imports(path):
            parts = name.split(".")
            feature = parts[3] if parts[:3] == ["megatron_ext", "integration", "features"] else own
            if own not in ("__init__", feature):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def test_files_are_documented_and_small():
    wrong = []
    for path in FILES:
        tree, name = _tree(path), path.relative_to(ROOT)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{name} has no docstring")
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{name} has {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}: {node.name} has {lines} lines")
    assert not wrong


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def test_classes_are_small():
    wrong = []
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                where = f"{path.relative_to(ROOT)}: {node.name}"
                lines = node.end_lineno - node.lineno + 1
                held = _attributes(node)
                if lines > MAX_CLASS_LINES:
                    wrong.append(f"{where} has {lines} lines")
                if len(held) > MAX_ATTRIBUTES:
                    wrong.append(f"{where} has {len(held)} attributes: {held}")
    assert not wrong


def _module(name: str) -> str:
    """The module that ``name``, a module or something in it, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    return name if path.with_suffix(".py").exists() or path.is_dir() else name.rpartition(".")[0]


# Of features, and of what ``schedule`` offers; neither does anything.
LISTS = ("megatron_ext/integration/features/__init__.py", "megatron_ext/schedule/__init__.py")


def test_modules_import_few_others():
    wrong = []
    for path in FILES:
        found = {_module(name) for _, name in _imports(path) if name.startswith("megatron_ext.")}
        where = path.relative_to(ROOT).as_posix()
        if len(found) > MAX_IMPORTS and where not in LISTS:
            wrong.append(f"{where} imports {len(found)} modules: {sorted(found)}")
    assert not wrong


def test_the_table_sees_a_wrong_import(tmp_path, monkeypatch):
    """Guards the two tests above: relative, nested and plain imports are all found."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "schedule" / "generators" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n    from ...runtime import executor\n    import torch.nn\n")
    assert _imports(path) == [
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


def test_one_place_knows_where_a_rank_computes():
    """A layout may leave a rank's first chunk without parameters: see ``utils.device_of``."""
    pattern = re.compile(r"next\(\s*(iter\()?[^\n]*\.parameters\(\)")
    assert pattern.search("next(models[0].parameters()).device")
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted((PACKAGE / "integration").rglob("*.py"))
        if pattern.search(path.read_text())
    ]
    assert found == []
