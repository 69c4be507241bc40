"""A short run leaves out what is listed, and a list that names no test is an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import short


def _items(*ids: str) -> Any:
    return [SimpleNamespace(nodeid=nodeid) for nodeid in ids]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "list.txt"
    files = ("a/test_a.py\n    test_x\n    Many::test_y[2]", "a/test_b.py\n    test_v[core-1]")
    path.write_text("\n".join([*files, "a/test_d.py\n"]))
    return path


def test_one_parameter_or_all_of_them(listed: Path) -> None:
    items = _items(
        "a/test_a.py::test_x[1]",
        "a/test_a.py::test_x",
        "a/test_a.py::Many::test_y[1]",
        "a/test_a.py::Many::test_y[2]",
        "a/test_c.py::test_x",
    )
    kept, others = short.split(items, listed)
    assert kept == [items[2], items[4]]
    assert others == [items[0], items[1], items[3]]


def test_a_whole_file(listed: Path) -> None:
    items = _items("a/test_d.py::test_x", "a/test_d.py::Many::test_y[2]")
    assert short.split(items, listed) == ([], items)


def test_any_version_of_megatron(listed: Path) -> None:
    items = _items("a/test_b.py::test_v[core_v0.19.0-1]", "a/test_b.py::test_v[core_v0.19.0-2]")
    assert short.split(items, listed) == (items[1:], items[:1])


def test_an_entry_without_a_test(listed: Path) -> None:
    items = _items("a/test_a.py::test_x", "a/test_a.py::Many::test_y[3]")
    with pytest.raises(pytest.UsageError, match=r"^list.txt names no test: a/test_a.py::Many::tes"):
        short.split(items, listed)
