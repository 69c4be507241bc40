"""The short run: which tests of the default tiers it leaves to continuous integration.

``tests/ci_only.txt`` lists them: a file's path, then, indented, its tests, each as it follows the
path in pytest's output; without parameters, a name stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from . import ROOT

LIST = ROOT / "tests" / "ci_only.txt"


def entries(path: Path) -> set[tuple[str, str]]:
    """Files from the repository's root, and tests in them."""
    found, file = set(), ""
    for line in path.read_text().splitlines():
        if line.startswith(" "):
            found.add((file, line.strip()))
        else:
            file = line
    return found


def split(
    items: Sequence[pytest.Item], path: Path = LIST
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """``items`` of the short run, and the others.

    Raises:
        pytest.UsageError: an entry names no test of a file that was collected.
    """
    listed, kept, others = entries(path), [], []
    unused = {entry for entry in listed if entry[0] in {_names(item)[0] for item in items}}
    for item in items:
        file, with_parameters = _names(item)
        matches = {(file, with_parameters), (file, with_parameters.split("[")[0])} & listed
        unused -= matches
        (others if matches else kept).append(item)
    if unused:
        names = ", ".join("::".join(entry) for entry in sorted(unused))
        raise pytest.UsageError(f"{path.name} names no test: {names}")
    return kept, others


def _names(item: pytest.Item) -> tuple[str, str]:
    """File and test; Megatron's version, which depends on that of Python, is left out."""
    file, _, name = item.nodeid.partition("::")
    return file, re.sub(r"core_v[\d.]+", "core", name)
