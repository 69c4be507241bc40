"""Applying patch series, with no Megatron: all or nothing, back to the byte, as git would do it.

The series here is made by git itself, on a small tree that looks like a checkout. The real series
are in tests/megatron/test_patches.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli, patching
from tests.support import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None, reason="needs git, which makes the patches of these tests"
)

FILES = {
    "megatron/training/one.py": "".join(f"line {n}\n" for n in range(40)),
    "megatron/training/two.py": "\n".join(["", "a\x0cb", "c \u2028 d", "", "end"]) + "\n",
    "README": "not touched\n",
}


def git(folder: Path, *command: str) -> str:
    """Run git with no configuration but what is needed."""
    env = dict(os.environ, GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    for who in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{who}_NAME": "test", f"GIT_{who}_EMAIL": "test@example.org"})
    done = subprocess.run(
        ["git", *command], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def tree(folder: Path) -> dict[str, Any]:
    """Kind, mode and hash of everything under ``folder``."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
        if ".git" not in path.parts
    }


def write_series(folder: Path, tag: str, patches: list[str], files: dict[str, Any]) -> None:
    """A series as scripts/make_patches.py writes it."""
    folder.mkdir(parents=True)
    names = [f"{number:04}-change.patch" for number, _ in enumerate(patches, 1)]
    for name, text in zip(names, patches):
        (folder / name).write_bytes(text.encode())
    manifest = {"format": patching.FORMAT, "tag": tag, "version": "9.8.1", "patches": names}
    (folder / patching.MANIFEST).write_text(json.dumps({**manifest, "files": files}))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree that says it is Megatron 9.8.2, in a repository."""
    folder = tmp_path / "checkout"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "megatron/training/two.py").chmod(0o755)
    info = folder / patching.PACKAGE_INFO
    info.parent.mkdir()
    info.write_text("MAJOR = 9\nMINOR = 8\nPATCH = 2\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "stock")
    return folder


@pytest.fixture
def series(checkout: Path, tmp_path: Path) -> Path:
    """Two patches; the second changes a file of the first once more. Made in the checkout."""
    one, two = checkout / "megatron/training/one.py", checkout / "megatron/training/two.py"
    before = {path: git(checkout, "hash-object", str(path)).strip() for path in (one, two)}
    patches = []
    one.write_text("first\n" + FILES["megatron/training/one.py"].replace("line 30\n", "") + "end\n")
    two.write_bytes(two.read_bytes().replace(b"c ", b"C "))
    patches.append(git(checkout, "diff", "--full-index"))
    git(checkout, "commit", "--quiet", "--all", "--message", "one")
    one.write_text(one.read_text().replace("line 12\n", "line 12\nmore\n"))
    patches.append(git(checkout, "diff", "--full-index"))
    files = {
        str(path.relative_to(checkout)): {
            "before": before[path],
            "after": git(checkout, "hash-object", str(path)).strip(),
        }
        for path in (one, two)
    }
    git(checkout, "reset", "--quiet", "--hard", "HEAD~1")
    write_series(tmp_path / "patches" / "core_v9.8.1", "core_v9.8.1", patches, files)
    return tmp_path / "patches"


def test_applied_and_reverted_to_the_byte(checkout: Path, series: Path) -> None:
    before = tree(checkout)
    assert patching.status(checkout, series).state == patching.NOT_APPLIED
    assert patching.apply(checkout, series).state == patching.APPLIED
    changed = {path for path, was in tree(checkout).items() if was != before[path]}
    assert changed == {"megatron/training/one.py", "megatron/training/two.py"}
    assert (checkout / "megatron/training/two.py").stat().st_mode & 0o777 == 0o755
    assert patching.revert(checkout, series).state == patching.NOT_APPLIED
    assert tree(checkout) == before
    assert git(checkout, "status", "--porcelain") == ""


def test_a_tarball_is_patched_too(checkout: Path, series: Path) -> None:
    shutil.rmtree(checkout / ".git")
    before = tree(checkout)
    patching.apply(checkout, series)
    patching.revert(checkout, series)
    assert tree(checkout) == before


@pytest.mark.parametrize("action", [patching.apply, patching.revert])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left", "x")])
def test_interrupted_between_two_files(
    checkout: Path, series: Path, monkeypatch: pytest.MonkeyPatch, action: Any, error: BaseException
) -> None:
    """The first file is there already: it goes back, and nothing is left lying about."""
    if action is patching.revert:
        patching.apply(checkout, series)
    before = tree(checkout)
    calls = []
    replace = os.replace

    def second_fails(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise error
        replace(*paths)

    monkeypatch.setattr(patching.os, "replace", second_fails)
    expected = patching.PatchError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        action(checkout, series)
    assert tree(checkout) == before


def test_killed_between_two_files(checkout: Path, series: Path) -> None:
    """Nobody can put back then; status says so, apply refuses, revert goes back."""
    before = tree(checkout)
    stock = (checkout / "megatron/training/one.py").read_bytes()
    patching.apply(checkout, series)
    (checkout / "megatron/training/one.py").write_bytes(stock)
    assert patching.status(checkout, series).state == patching.PARTIAL
    with pytest.raises(patching.PatchError, match="only 1 of 2 files patched"):
        patching.apply(checkout, series)
    assert patching.revert(checkout, series).state == patching.NOT_APPLIED
    assert tree(checkout) == before


@pytest.mark.parametrize("damage", ["context", "header", "result"])
def test_a_damaged_second_patch(checkout: Path, series: Path, damage: str) -> None:
    patch = series / "core_v9.8.1" / "0002-change.patch"
    old, new = {
        "context": (" line 12\n", " line 13\n"),
        "header": (" @@", ",3 @@"),
        "result": ("+more\n", "+less\n"),
    }[damage]
    assert old in patch.read_text()
    patch.write_text(patch.read_text().replace(old, new, 1))
    before = tree(checkout)
    with pytest.raises(patching.PatchError, match="nothing was changed"):
        patching.apply(checkout, series)
    assert tree(checkout) == before


@pytest.mark.parametrize("seed", range(10))
def test_patches_of_git_are_applied_as_git_means_them(tmp_path: Path, seed: int) -> None:
    """Random edits, with and without context, at the ends too; both directions."""
    dice = random.Random(seed)
    old = [f"{dice.randrange(5)}\n" for _ in range(dice.randrange(1, 30))]
    new = [x for line in old for x in dice.choice([[line], [line], [line], [], ["x\n", line]])]
    for side, lines in (("a", old), ("b", [*new, "last\n"])):
        (tmp_path / side).mkdir()
        (tmp_path / side / "f").write_text("".join(lines))
    command = ["git", "diff", "--no-index", "--no-prefix", f"-U{seed % 4}", "a/f", "b/f"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    patch = tmp_path / "x.patch"
    patch.write_bytes(done.stdout)
    before, after = ((tmp_path / side / "f").read_bytes() for side in "ab")
    contents = {"f": before}
    patching._patch(contents, patch, reverse=False)
    assert contents["f"] == after
    patching._patch(contents, patch, reverse=True)
    assert contents["f"] == before


def refusals(checkout: Path) -> dict[str, Any]:
    """What can be wrong with a checkout -> what makes it so."""
    target = checkout / "megatron/training/one.py"
    info = checkout / patching.PACKAGE_INFO
    return {
        "has changes of its own": lambda: target.write_text(target.read_text() + "# mine\n"),
        "is missing": lambda: target.rename(target.with_name("moved.py")),
        "is a link": lambda: (
            target.rename(target.with_name("moved.py")),
            target.symlink_to("moved.py"),
        ),
        "is behind a link": lambda: (
            target.parent.rename(checkout.parent / "elsewhere"),
            target.parent.symlink_to(checkout.parent / "elsewhere"),
        ),
        "Megatron 9.7.0, and there are patches for core_v9.8.1 only": lambda: info.write_text(
            "MAJOR = 9\nMINOR = 7\nPATCH = 0\n"
        ),
        "which version": lambda: info.write_text("VERSION = 1\n"),
        "is no Megatron-LM checkout": lambda: info.unlink(),
        "already": lambda: patching.apply(checkout, checkout.parent / "patches"),
    }


@pytest.mark.parametrize("kind", list(refusals(Path())))
def test_refusals(checkout: Path, series: Path, kind: str) -> None:
    """One sentence, and nothing changed."""
    refusals(checkout)[kind]()
    before = tree(checkout)
    with pytest.raises(patching.PatchError) as error:
        patching.apply(checkout, series)
    assert kind in str(error.value)
    assert "\n" not in str(error.value)
    assert tree(checkout) == before
    if kind != "already":
        with pytest.raises(patching.PatchError):
            patching.revert(checkout, series)
        assert tree(checkout) == before


@pytest.fixture
def script(series: Path) -> Path:
    """scripts/apply_patches.sh, beside this test's patches."""
    folder = series.parent / "scripts"
    folder.mkdir()
    return Path(shutil.copy(ROOT / "scripts" / "apply_patches.sh", folder))


def shell(*command: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("with_git", [True, False])
def test_script_does_the_same(checkout: Path, series: Path, script: Path, with_git: bool) -> None:
    """A tarball inside somebody's repository: there, plain ``git apply`` silently does nothing."""
    if not with_git:
        (checkout / ".git").rename(checkout.parent / ".git")
    stock = tree(checkout)
    patching.apply(checkout, series)
    patched = tree(checkout)
    assert shell(script, "--revert", checkout)[0] == 0
    assert tree(checkout) == stock
    assert shell(script, checkout)[0] == 0
    assert tree(checkout) == patched
    # As after an interrupted run.
    patching.revert(checkout, series)
    clean = (checkout / "megatron/training/one.py").read_bytes()
    patching.apply(checkout, series)
    (checkout / "megatron/training/one.py").write_bytes(clean)
    status, _, said = shell(script, checkout)
    assert (status, "1 of 2" in said) == (2, True)
    assert shell(script, "--revert", checkout)[0] == 0
    assert tree(checkout) == stock


@pytest.mark.parametrize("kind", [k for k in refusals(Path()) if k != "which version"])
def test_script_refuses_the_same(checkout: Path, series: Path, script: Path, kind: str) -> None:
    refusals(checkout)[kind]()
    before = tree(checkout)
    status, out, said = shell(script, checkout)
    assert (status, out) == (2, "")
    assert said.count("\n") == 1 and said.startswith("apply_patches: ")
    assert kind.removeprefix("is ").split(",")[0] in said
    assert tree(checkout) == before


def test_script_with_a_damaged_patch(checkout: Path, series: Path, script: Path) -> None:
    patch = series / "core_v9.8.1" / "0002-change.patch"
    patch.write_text(patch.read_text().replace("+more\n", "+less\n"))
    before = tree(checkout)
    status, _, said = shell(script, checkout)
    assert (status, "nothing was changed" in said) == (2, True)
    assert tree(checkout) == before


def test_command(checkout: Path, series: Path, capsys: Any, monkeypatch: Any) -> None:
    """Exit status, text and JSON of the three actions."""
    monkeypatch.setattr(patching, "patches_folder", lambda: series)

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["patch", *argv])
        return (status, *capsys.readouterr())

    where = str(checkout)
    assert run("status", where)[:2][0] == 1
    status, out, err = run("apply", where, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "checkout": where,
        "version": "9.8.2",
        "tag": "core_v9.8.1",
        "state": "applied",
        "patches": ["0001-change.patch", "0002-change.patch"],
        "files": {f"megatron/training/{name}.py": "applied" for name in ("one", "two")},
    }
    assert run("status", where)[0] == 0
    status, out, err = run("apply", where)
    assert (status, out) == (2, "")
    assert err.startswith("megatron-ext patch: ") and err.count("\n") == 1
    assert run("revert", where)[0] == 0
    assert "not applied" in run("status", where)[1]
    assert run("status", str(checkout.parent))[0] == 2


def test_the_patches_of_this_repository_are_found() -> None:
    tags = [series.tag for series in patching.load_all()]
    assert tags == ["core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0"]
    for series in patching.load_all():
        found = sorted(path.name for path in series.patches[0].parent.glob("*.patch"))
        assert [path.name for path in series.patches] == found
