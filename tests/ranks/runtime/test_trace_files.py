"""A trace directory may be in a place that others write to, such as /tmp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.runtime.files import folder
from megatron_ext.runtime.trace import TraceFile


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_the_owner_can_write(tmp_path: Path) -> None:
    TraceFile(tmp_path / "a" / "b", "rank0").write({"x": 1})
    modes = [
        p.stat().st_mode & 0o777 for p in (tmp_path / "a", *sorted((tmp_path / "a").rglob("*")))
    ]
    assert modes == [0o755, 0o755, 0o644]


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "traces").mkdir()
    trace = tmp_path / "traces" / "rank0.jsonl"
    for make in (trace.symlink_to, trace.hardlink_to):
        make(precious)
        TraceFile(tmp_path / "traces", "rank0").write({"x": 1})
        assert precious.read_text() == "keep me"
        assert trace.read_text() == '{"x": 1}\n'
        trace.unlink()


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    for turn in range(2):
        TraceFile(tmp_path, "rank0").write({"turn": turn})
    assert (tmp_path / "rank0.jsonl").read_text() == '{"turn": 1}\n'


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        folder(tmp_path / "file")
    with pytest.raises(OSError):
        folder(tmp_path / "file" / "below")
