"""Every sentence that refuses something, against a golden file: a rebuild loses no rule of a door.

The sentences stand in the sources; what is filled in is shown as ``{}``. A door is a part of the
package, so that moving a rule within it changes nothing. UPDATE_GOLDEN=1 writes the file anew.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import ROOT

GOLDEN = Path(__file__).parent / "refusals.txt"


def sentence(node: ast.AST, known: Mapping[str, str]) -> str:
    """The text of an expression, of ``known`` names too."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(sentence(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return sentence(node.value, known)
    if isinstance(node, ast.BinOp):
        return sentence(node.left, known) + sentence(node.right, known)
    return known.get(node.id, "{}") if isinstance(node, ast.Name) else "{}"


def refusals(source: str) -> Iterator[str]:
    """The sentences of one module."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = sentence(node.value, known)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        option = bool(node.args) and sentence(node.args[0], known).startswith("--")
        derived = option and name.startswith("_") and name[1:2].isupper()
        if (name.endswith("Conflict") or derived) and len(node.args) > 1:
            values = [sentence(k.value, known) for k in node.keywords if k.arg == "only"]
            flag, why = (sentence(part, known) for part in node.args[:2])
            yield f"{flag}: {why} {' '.join(values)}".strip()
        elif name == "Rule" and len(node.args) == 2:
            yield " ".join(re.sub(r"{[^{}]*}", "{}", sentence(node.args[1], known)).split())
        elif name == "Flag" and node.args:
            flag = sentence(node.args[0], known)
            for keyword in node.keywords:
                if keyword.arg == "not_in_library":
                    yield f"{flag} in a library: {sentence(keyword.value, known)}"
                elif keyword.arg == "excludes" and isinstance(keyword.value, ast.Tuple):
                    other, why = (sentence(part, known) for part in keyword.value.elts)
                    yield f"{flag} and {other}: {why}"
        elif (name.endswith("Error") or name == "error") and node.args:
            yield sentence(node.args[0], known)


def found() -> list[str]:
    """``door: sentence`` of all doors."""
    lines = set()
    for file in (ROOT / "megatron_ext").rglob("*.py"):
        door = file.relative_to(ROOT / "megatron_ext").parts[0].removesuffix(".py")
        lines |= {f"{door}: {' '.join(text.split())}" for text in refusals(file.read_text())}
    return sorted(line for line in lines if line.rpartition(": ")[2] != "{}")


@pytest.mark.matrix
def test_no_refusal_is_lost() -> None:
    now = found()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(now) + "\n", encoding="utf-8")
    before = set(GOLDEN.read_text(encoding="utf-8").splitlines())
    assert (sorted(before - {*now}), sorted({*now} - before)) == ([], []), "lost, new"


def test_sentences() -> None:
    source = """WHY = f"it {what}"
CONFLICTS = (Conflict("--x", WHY + "; drop it", only="V"),)
def f(n):
    raise ValueError(f"{n} is " "too large")
"""
    assert list(refusals(source)) == ["--x: it {}; drop it V", "{} is too large"]
    source = 'FLAGS = (Flag("--x", "help", not_in_library="it is", excludes=("--y", "are")),)'
    assert list(refusals(source)) == ["--x in a library: it is", "--x and --y: are"]
