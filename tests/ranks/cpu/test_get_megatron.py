"""Fetching a Megatron-LM checkout, from a toy repository."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.releases import LIST, TAGS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(scope="module")
def script(repo_root: Path) -> Path:
    return repo_root / "scripts" / "get_megatron.sh"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with one commit that looks like Megatron, tagged as a supported version."""
    folder = tmp_path / "source"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("toy = True\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "toy"], check=True)
    subprocess.run([*git, "tag", "core_v0.19.0"], check=True)
    return folder


def test_fetches_once(run: Run, script: Path, source: Path, tmp_path: Path) -> None:
    where = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MEGATRON_LM_GIT": str(source)}
    done = run(script, "core_v0.19.0", **where)
    assert done.returncode == 0, done.stderr
    target = tmp_path / "cache" / "megatron-ext" / "Megatron-LM" / "core_v0.19.0"
    assert done.stdout == f"{target}\n"
    assert (target / "megatron" / "core" / "__init__.py").read_text() == "toy = True\n"
    shutil.rmtree(source)
    again = run(script, "core_v0.19.0", **where)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{target}\n", "")


def test_failure_leaves_nothing(run: Run, script: Path, source: Path, tmp_path: Path) -> None:
    where = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MEGATRON_LM_GIT": str(source)}
    done = run(script, "core_v0.18.2", **where)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "set MEGATRON_LM_GIT" in done.stderr.splitlines()[-1]
    assert list((tmp_path / "cache" / "megatron-ext" / "Megatron-LM").iterdir()) == []


def test_fetches_a_commit_without_a_tag(
    run: Run, script: Path, source: Path, tmp_path: Path
) -> None:
    """By its full name, though the branch has moved on; a copy of the list names it."""
    git = ["git", "-C", str(source), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "later"], check=True)
    for folder, file in (("scripts", script), ("megatron_ext", LIST)):
        (tmp_path / "copy" / folder).mkdir(parents=True)
        shutil.copy(file, tmp_path / "copy" / folder)
    tag = f"core_v0.99.0-{commit[:8]}"
    with (tmp_path / "copy" / "megatron_ext" / LIST.name).open("a") as file:
        file.write(f"{tag} 0.99.0 2.15.0 {commit}\n")
    where = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MEGATRON_LM_GIT": str(source)}
    done = run(tmp_path / "copy" / "scripts" / script.name, tag, **where)
    assert done.returncode == 0, done.stderr
    head = ["git", "-C", done.stdout.strip(), "rev-parse", "HEAD"]
    assert subprocess.run(head, capture_output=True, text=True).stdout == commit


@pytest.mark.parametrize("arguments", [["core_v0.12.0"], []])
def test_says_what_is_supported(run: Run, script: Path, arguments: list[str]) -> None:
    done = run(script, *arguments)
    assert done.returncode == 2
    assert " ".join(TAGS) in done.stderr


def test_lists_versions(run: Run, script: Path) -> None:
    done = run(script, "--list")
    assert tuple(done.stdout.split()) == TAGS
