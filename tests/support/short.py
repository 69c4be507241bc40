"""The short run: which tests of the default tiers run in continuous integration alone.

``tests/ci_only.txt`` lists them: a file's path, then, indented, its tests, each as it follows the
path in pytest's output. A name without parameters stands for all of them, a path alone for all
tests of the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from . import ROOT

LIST = ROOT / "tests" / "ci_only.txt"


def entries(path: Path) -> set[tuple[str, str]]:
    """Files from the repository's root, and tests in them, or none for all."""
    found: set[tuple[str, str]] = set()
    for block in re.split(r"\n(?! )", path.read_text().strip()):
        file, *tests = block.split("\n    ")
        found |= {(file, test) for test in tests or [""]}
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
        names = (with_parameters, with_parameters.split("[")[0], "")
        matches = {(file, name) for name in names} & listed
        unused -= matches
        (others if matches else kept).append(item)
    if unused:
        every = ", ".join("::".join(entry) for entry in sorted(unused))
        raise pytest.UsageError(f"{path.name} names no test: {every}")
    return kept, others


def _names(item: pytest.Item) -> tuple[str, str]:
    """File and test, without what differs between machines: Megatron's version, this checkout."""
    file, _, name = item.nodeid.partition("::")
    return file, re.sub(r"core_v[\d.]+", "core", name.replace(f"{ROOT}/", ""))
