"""Our lines in a checkout: inserted in one step, removed to the byte, by the command and by git.

On stock checkouts: tests/checkout/test_patches.py.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli, patching
from megatron_ext.releases import NEWEST, TAGS
from scripts.make_patches import patch_text
from tests.support import ROOT

HEAD = '''"""Megatron's arguments, with a form feed \x0c and a separator \u2028."""
import argparse


def add_megatron_arguments(parser):
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    """Parse all arguments."""
'''
BODY = """    parser = argparse.ArgumentParser(description='Megatron-LM Arguments',
                                     allow_abbrev=False)

    return parser.parse_args([])
"""
STOCK = (HEAD + BODY).encode()
# As the first version of the patches inserted them, without markers.
UNMARKED = HEAD.encode() + patching._UNMARKED + BODY.encode()
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


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


def set_version(checkout: Path, major: int, minor: int, patch: int = 7, pre: str = "") -> None:
    """What package_info.py states."""
    text = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = '{pre}'\n"
    (checkout / patching.PACKAGE_INFO).write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree that looks like the newest supported Megatron."""
    folder = tmp_path / "checkout"
    for name in (patching.FILE, patching.PACKAGE_INFO):
        (folder / name).parent.mkdir(parents=True)
    (folder / patching.FILE).write_bytes(STOCK)
    (folder / patching.FILE).chmod(0o640)
    set_version(folder, *NEWEST.line)
    return folder


def test_applied_and_reverted_to_the_byte(checkout: Path) -> None:
    before = tree(checkout)
    assert patching.status(checkout).state == patching.NOT_APPLIED
    found = patching.apply(checkout)
    assert (found.state, found.tag, found.warning) == (patching.APPLIED, NEWEST.tag, "")
    after = tree(checkout)
    assert {name for name in after if after[name] != before[name]} == {patching.FILE}
    assert after[patching.FILE][0] == before[patching.FILE][0]
    assert patching.apply(checkout) == found and tree(checkout) == after, "as often as one likes"
    assert patching.revert(checkout).state == patching.NOT_APPLIED
    assert tree(checkout) == before
    assert patching.revert(checkout).state == patching.NOT_APPLIED
    assert tree(checkout) == before


FORMS = {
    "as stock": STOCK,
    "Windows line ends": STOCK.replace(b"\n", b"\r\n"),
    "changes of the user's": STOCK.replace(b"return parser.", b"return  parser.") + b"# mine\n",
    "another signature and text": STOCK.replace(b"None, ignore", b"None,\n  *, ignore").replace(
        b"Parse all arguments.", b"Parse\n    all of them."
    ),
    "no documentation": STOCK.replace(b'    """Parse all arguments."""\n', b"    # Parse.\n"),
    "no newline at the end": STOCK.rstrip(),
    "a decorator first": STOCK.replace(
        b'    """Parse all arguments."""\n',
        b"    @cache\n    @other\n    def f():\n        return 1\n\n",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_lines_come_first_in_the_function(form: str) -> None:
    patched = patching.insert(FORMS[form])
    assert patching.remove(patched) == FORMS[form] != patched
    ends = (patched.count(b"\r\n"), patched.count(b"\n"))
    assert ends[0] in ((0, ends[1]) if form == "Windows line ends" else (0,))
    (function,) = (
        node
        for node in ast.parse(patched).body
        if isinstance(node, ast.FunctionDef) and node.name == "parse_args"
    )
    statements = function.body[ast.get_docstring(function) is not None :]
    assert [type(x) for x in statements[:4]] == [ast.Import, ast.Assign, ast.Assign, ast.If]
    assert "megatron_ext.apply(exist_ok=True)" in ast.unparse(statements[3])


@pytest.mark.parametrize(
    "older",
    [
        UNMARKED,
        HEAD.encode()
        + patching._BEGIN
        + patching._checksum(b"    other = 1\n")
        + b": why\n    other = 1\n"
        + patching._END
        + BODY.encode(),
    ],
)
def test_lines_of_another_version(checkout: Path, older: bytes) -> None:
    """Replaced by apply, removed by revert; both end where a stock file would."""
    file = checkout / patching.FILE
    file.write_bytes(older)
    assert patching.status(checkout).state == patching.OUTDATED
    assert patching.apply(checkout).state == patching.APPLIED
    assert file.read_bytes() == patching.insert(STOCK)
    file.write_bytes(older)
    patching.revert(checkout)
    assert file.read_bytes() == STOCK


def damaged(patched: bytes) -> dict[str, bytes]:
    """A patched file after somebody's edit of our lines."""
    block = patched[len(HEAD.encode()) : len(patched) - len(BODY.encode())]
    return {
        "edited": patched.replace(b"if asked:", b"if asked and True:"),
        "cut off": patched.replace(patching._END, b""),
        "end alone": patched.replace(
            patched[patched.index(patching._BEGIN) :].split(b"\n")[0], b""
        ),
        "twice": patched.replace(block, block + block),
        "marked and unmarked": UNMARKED.replace(BODY.encode(), block + BODY.encode()),
    }


@pytest.mark.parametrize("how", damaged(patching.insert(STOCK)))
def test_edited_lines_are_nobodys_to_remove(checkout: Path, how: str) -> None:
    (checkout / patching.FILE).write_bytes(damaged(patching.insert(STOCK))[how])
    before = tree(checkout)
    assert patching.status(checkout).state == patching.MODIFIED
    for action in (patching.apply, patching.revert):
        with pytest.raises(patching.PatchError, match="edited lines of megatron_ext in"):
            action(checkout)
    assert tree(checkout) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STOCK.replace(b"parse_args", b"parse"), "has no function parse_args"),
        (STOCK + b"(\n", "is not valid Python"),
        (b"def parse_args():\n\treturn 1\n", "indented by four spaces"),
    ],
)
def test_another_file_is_left_as_it_is(checkout: Path, text: bytes, words: str) -> None:
    (checkout / patching.FILE).write_bytes(text)
    before = tree(checkout)
    for action in (patching.apply, patching.revert):
        with pytest.raises(patching.PatchError, match=words):
            action(checkout)
    assert tree(checkout) == before


@pytest.mark.parametrize("version", [(0, 15), (1, 0)])
def test_an_unsupported_version_is_patched_with_a_warning(
    checkout: Path, capsys: Any, version: tuple[int, int]
) -> None:
    set_version(checkout, *version)
    before = tree(checkout)
    assert cli.main(["patch", "apply", str(checkout), "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["tag"], data["patches"], data["state"]) == (None, [], "applied")
    assert data["warning"] in err and err.count("\n") == 1 and TAGS[-1] in err
    assert cli.main(["patch", "revert", str(checkout)]) == 0
    assert tree(checkout) == before


def test_command(checkout: Path, capsys: Any) -> None:
    """Exit status, text and JSON of the three actions."""

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["patch", *argv])
        return (status, *capsys.readouterr())

    where = str(checkout)
    assert run("status", where)[0] == 1
    status, out, err = run("apply", where, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "checkout": where,
        "version": f"{NEWEST.line[0]}.{NEWEST.line[1]}.7",
        "tag": NEWEST.tag,
        "state": "applied",
        "changed": True,
        "patches": [patching.PATCH_NAME],
        "files": {patching.FILE: "applied"},
        "warning": None,
        "problem": None,
    }
    assert run("status", where)[0] == 0
    status, out, err = run("apply", where)
    assert (status, err) == (0, "") and f"{patching.FILE}: already applied\n" in out
    assert "--pp-schedule v-half" in out.splitlines()[-1], "what to do next"
    assert json.loads(run("apply", where, "--json")[1])["changed"] is False
    assert run("revert", where)[0] == 0
    assert "not applied" in run("status", where)[1]
    status, out, err = run("revert", where)
    assert (status, err) == (0, "") and "nothing to revert" in out
    assert run("status", str(checkout.parent))[0] == 2
    (checkout / patching.FILE).write_bytes(b"x = 1\n")
    status, out, _ = run("status", where)
    assert (status, "modified" in out, "no function parse_args" in out) == (1, True, True)


# Plain git: the committed patches, and the script around them.


def shell(*command: object, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    words = [str(x) for x in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """scripts/apply_patches.sh, beside a patch for the checkout of these tests."""
    for name in ("scripts", f"patches/{NEWEST.tag}"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "patches" / NEWEST.tag / patching.PATCH_NAME).write_text(patch_text(STOCK))
    return Path(shutil.copy(ROOT / "scripts" / "apply_patches.sh", tmp_path / "scripts"))


@needs_git
@pytest.mark.parametrize("repository", ["none", "its own", "around it"])
def test_script_and_command_undo_each_other(checkout: Path, script: Path, repository: str) -> None:
    """Inside somebody's repository, plain ``git apply`` would silently do nothing."""
    if repository != "none":
        where = checkout if repository == "its own" else checkout.parent
        shell("git", "init", "--quiet", where)
    (checkout / patching.FILE).chmod(0o644)  # git knows no other modes
    stock = tree(checkout)
    patching.apply(checkout)
    patched = tree(checkout)
    assert shell(script, "--revert", checkout) == (0, "", "")
    assert tree(checkout) == stock
    again = (0, "", f"apply_patches: {checkout}: not applied, nothing to revert\n")
    assert shell(script, "--revert", checkout) == again
    assert shell(script, checkout) == (0, "", "")
    assert tree(checkout) == patched
    assert shell(script, checkout) == (0, "", f"apply_patches: {checkout}: applied already\n")
    assert tree(checkout) == patched
    assert patching.revert(checkout).state == patching.NOT_APPLIED
    assert tree(checkout) == stock


@pytest.mark.parametrize("tag", TAGS)
def test_committed_patches_insert_the_same_lines(tag: str) -> None:
    (path,) = (ROOT / "patches" / tag).iterdir()
    assert path.name == patching.PATCH_NAME
    added = [x[1:] for x in path.read_text().splitlines() if x.startswith("+") and x[:3] != "+++"]
    patched = patching.insert(STOCK).decode()
    assert "\n".join(added) + "\n" == patched[len(HEAD) : -len(BODY)]
    assert sorted(folder.name for folder in (ROOT / "patches").iterdir()) == sorted(TAGS)
