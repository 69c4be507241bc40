"""Text in, Megatron dataset out, and the same text back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def script(repo_root: Path) -> Path:
    return repo_root / "scripts" / "prepare_text_dataset.py"


@pytest.fixture(scope="module")
def module(script: Path) -> ModuleType:
    """The script as a module; importing it needs neither torch nor Megatron."""
    spec = importlib.util.spec_from_file_location("prepare_text_dataset", script)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "b" / "site-packages").mkdir(parents=True)
    (folder / "b" / "site-packages" / "left_out.txt").write_text("no")
    (folder / "b" / "one.txt").write_bytes("é\n".encode())
    (folder / "a.txt").write_bytes(b"hello")
    (folder / "c.txt").write_bytes(b"the end")
    (folder / "other.bin").write_bytes(b"not asked for")
    (folder / "broken.txt").write_bytes(b"\xff\xfe")
    (folder / "zero.txt").write_bytes(b"a\0b")
    (folder / "empty.txt").touch()
    return folder


def test_round_trip(
    run: Run,
    script: Path,
    module: ModuleType,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Written here, where Megatron is imported anyway, and read with Megatron's own reader."""
    pytest.importorskip("megatron.core")
    prefix = tmp_path / "data" / "text"
    command = (script, "--input", texts, "--output", prefix, "--glob", "*.txt")
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    assert module.main() == 0
    assert "3 documents, 18 tokens, 3 files skipped" in capsys.readouterr().out
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    expected = [[*content, 256] for content in (b"hello", "é\n".encode(), b"the end")]
    assert [data[i].tolist() for i in range(len(data))] == expected
    assert len(data.document_indices) - 1 == 3
    # Where all is done, not even megatron-core is needed.
    again = run(sys.executable, "-S", *command)
    assert (again.returncode, again.stderr) == (0, "")
    assert "18 tokens" in again.stdout
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "text.bin",
        "text.idx",
        "text.json",
    ]


def test_order_and_exclusion(module: ModuleType, texts: Path) -> None:
    found = module.find_files([texts / "b", texts], ["*.txt"], ["site-packages"])
    names = [path.relative_to(texts).as_posix() for path in found]
    assert names == [
        "b/one.txt",
        *["a.txt", "b/one.txt", "broken.txt", "c.txt", "empty.txt", "zero.txt"],
    ]


def test_changed_request_is_made_again(module: ModuleType, tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    record = {"request": {"max_mb": 1}, "size_bytes": 2, "tokens": 1}
    Path(f"{prefix}.json").write_text(json.dumps(record))
    assert module.is_done(prefix, {"max_mb": 1}) is None
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").write_bytes(b"xx")
    assert module.is_done(prefix, {"max_mb": 1}) == record
    assert module.is_done(prefix, {"max_mb": 2}) is None
    Path(f"{prefix}.bin").write_bytes(b"cut off later")
    assert module.is_done(prefix, {"max_mb": 1}) is None


def test_mistakes_are_one_sentence(run: Run, script: Path, texts: Path, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "text")
    done = run(sys.executable, script, "--input", tmp_path / "nowhere", *output)
    assert done.returncode == 2
    assert "nowhere does not exist" in done.stderr
    done = run(sys.executable, script, "--input", texts, "--glob", "*.rs", *output)
    assert done.returncode == 2
    assert "matches *.rs" in done.stderr
    assert len(done.stderr.splitlines()) == 1
