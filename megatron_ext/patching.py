"""Patches a Megatron-LM checkout to take our flags without the launcher: a few lines in one file.

Every training script of every version parses its command line with ``parse_args``. ``apply``
inserts the same lines at the top of that function, between two marker comments; ``revert`` removes
them, and the file is the original one, byte by byte. The opening marker holds a checksum of the
lines, so lines of another version of megatron_ext are recognized and edited ones are refused.
Nothing of the checkout is run, and neither git nor a ``.git`` folder is needed.

``patches/<tag>/`` holds the same change as plain patches for ``git apply``, made by ``insert``.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .releases import TAGS, closest

FILE = "megatron/training/arguments.py"
FUNCTION = "parse_args"
PACKAGE_INFO = "megatron/core/package_info.py"
PATCH_NAME = "0001-ask-megatron_ext-for-its-flags.patch"

NOT_APPLIED = "not applied"
APPLIED = "applied"
OUTDATED = "applied by another version of megatron_ext"
MODIFIED = "modified"

# Prefixes rather than names: flags that megatron_ext gains must not need new lines. No flag of
# Megatron's own begins so in any supported version (a test looks).
PREFIXES = ("--pp-", "--moe-pipeline-", "--moe-memory-")
_BODY = f"""    import sys
    ours = {PREFIXES!r}
    asked = [arg for arg in sys.argv[1:] if arg.startswith(ours)]
    if asked:
        try:
            import megatron_ext
        except ImportError as error:
            sys.exit(f'{{asked[0]}} needs megatron_ext ({{error}}): install it or drop this flag.')
        megatron_ext.apply(exist_ok=True)
""".encode()
_BEGIN, _END = b"    # >>> megatron_ext ", b"    # <<< megatron_ext\n"
_WHY = b": only if one of its flags is on the command line\n"
# Before there were markers: the same lines between a comment and an empty line.
_UNMARKED = (
    b"    # megatron_ext: only if one of its flags is on the command line.\n" + _BODY + b"\n"
)
_ANY_BLOCK = re.compile(
    rb"^%s([0-9a-f]+):[^\n]*\n(.*?)^%s" % (_BEGIN, _END.replace(b"\n", rb"\r?\n")), re.M | re.S
)


class PatchError(Exception):
    """A checkout cannot be patched; the text is one sentence for the user. Nothing was changed."""


@dataclass(frozen=True)
class Status:
    """What a checkout is.

    Attributes:
        checkout: its folder.
        version: of Megatron, such as ``0.19.1``.
        tag: of the supported release of that line; None: there is none.
        state: one of the constants above.
        problem: why it can be neither patched nor reverted; empty: it can.
    """

    checkout: Path
    version: str
    tag: str | None
    state: str
    problem: str = ""

    @property
    def warning(self) -> str:
        """What a user should know of this version; empty for a supported one."""
        if self.tag is not None:
            return ""
        return (
            f"Megatron {self.version} is none of the supported releases ({', '.join(TAGS)}); "
            "training checks all that it needs and may refuse it"
        )


def insert(source: bytes) -> bytes:
    """The text of ``FILE`` with our lines, from the original one.

    Raises:
        PatchError: there is no place for them, or the result would not be Python.
    """
    at = _place(source)
    ends = b"\r\n" if source[:at].endswith(b"\r\n") else b"\n"
    block = _BEGIN + _checksum(_BODY) + _WHY + _BODY + _END
    patched = source[:at] + block.replace(b"\n", ends) + source[at:]
    _parsed(patched)
    if remove(patched) != source:
        raise PatchError(f"{FILE} would not be the original after a revert")
    return patched


def remove(source: bytes) -> bytes:
    """The text of ``FILE`` without our lines, of whatever version; as it is where there are none.

    Raises:
        PatchError: the lines were edited, or are there more than once.
    """
    start, end = _block(source)
    return source[:start] + source[end:]


def status(checkout: Path) -> Status:
    """Which version ``checkout`` is, and whether our lines are in.

    Raises:
        PatchError: it is no checkout.
    """
    version = read_version(checkout)
    release = closest(version)
    tag = None if release is None else release.tag
    try:
        source = _read(checkout)
        original = remove(source)
        patched = insert(original)
    except PatchError as error:
        return Status(checkout, version, tag, MODIFIED, str(error))
    state = NOT_APPLIED if source == original else APPLIED if source == patched else OUTDATED
    return Status(checkout, version, tag, state)


def apply(checkout: Path) -> Status:
    """Insert our lines; those of another version of megatron_ext are replaced, our own stay.

    Raises:
        PatchError: they do not fit.
    """
    found = _usable(checkout)
    if found.state == APPLIED:
        return found
    _replace(checkout / FILE, insert(remove(_read(checkout))))
    return status(checkout)


def revert(checkout: Path) -> Status:
    """Remove our lines: the file has its original bytes and mode again. Without any it stays.

    Raises:
        PatchError: they were edited.
    """
    found = _usable(checkout)
    if found.state == NOT_APPLIED:
        return found
    _replace(checkout / FILE, remove(_read(checkout)))
    return status(checkout)


def read_version(checkout: Path) -> str:
    """Version of a checkout, e.g. ``0.19.1`` or ``0.20.0rc0``, read without running anything of it.

    Raises:
        PatchError: this is no Megatron-LM checkout.
    """
    try:
        text = (checkout / PACKAGE_INFO).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PatchError(
            f"{checkout} is no Megatron-LM checkout ({PACKAGE_INFO}: {error.strerror}); give the "
            "folder that holds pretrain_gpt.py"
        ) from None
    numbers = [re.search(rf"^{n}\s*=\s*(\d+)", text, re.M) for n in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        raise PatchError(f"{checkout}/{PACKAGE_INFO} does not give the version of Megatron")
    suffix = re.search(r"^PRE_RELEASE\s*=\s*['\"]([\w.]*)['\"]", text, re.M)
    return ".".join(number[1] for number in numbers if number) + (suffix[1] if suffix else "")


def _usable(checkout: Path) -> Status:
    found = status(checkout)
    if found.problem:
        raise PatchError(
            f"{found.problem} in {checkout} (Megatron {found.version}), so nothing was changed; "
            "restore the file, or train with `python -m megatron_ext.launch`, which needs no patch"
        )
    return found


def _read(checkout: Path) -> bytes:
    path = checkout / FILE
    if path.is_symlink():
        raise PatchError(f"{FILE} is a link")
    if path.parent.resolve() != (checkout.resolve() / FILE).parent:
        raise PatchError(f"{FILE} is behind a link")  # it may be another checkout's
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{FILE} cannot be read ({error.strerror})") from None


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body.replace(b"\r\n", b"\n")).hexdigest()[:8].encode()


def _block(source: bytes) -> tuple[int, int]:
    """Where our lines begin and end; (0, 0) where there are none."""
    marked = list(_ANY_BLOCK.finditer(source))
    blocks = [*marked, *re.finditer(re.escape(_UNMARKED), source)]
    markers = sum(source.count(marker.strip()) for marker in (_BEGIN, _END))
    edited = any(_checksum(found[2]) != found[1] for found in marked)
    if edited or len(blocks) > 1 or markers != 2 * len(marked):
        raise PatchError(f"{FILE} has edited lines of megatron_ext")
    return blocks[0].span() if blocks else (0, 0)


def _parsed(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise PatchError(f"{FILE} is not valid Python ({error})") from None


def _place(source: bytes) -> int:
    """Offset of the first line of ``FUNCTION`` behind its documentation.

    Raises:
        PatchError: no line of its own is there.
    """
    functions = [
        node
        for node in _parsed(source).body
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    ]
    if len(functions) != 1:
        raise PatchError(f"{FILE} has no function {FUNCTION} for our lines")
    first = functions[0].body[0]
    documented = ast.get_docstring(functions[0], clean=False) is not None
    lines = source.splitlines(keepends=True)
    if lines[first.lineno - 1][: first.col_offset] != b"    ":
        raise PatchError(
            f"the body of {FUNCTION} in {FILE} does not begin on a line of its own, indented by "
            "four spaces"
        )
    starts = [first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))]
    above = (first.end_lineno or 0) if documented else min(starts) - 1
    if not lines[above - 1].endswith(b"\n"):
        raise PatchError(f"{FILE} has no line end (LF or CR LF) where our lines belong")
    return sum(map(len, lines[:above]))


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one step, with its mode and owner: all of it or nothing."""
    name = None
    try:
        found = path.stat()
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        if (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
            os.chown(name, found.st_uid, found.st_gid)
        os.chmod(name, stat.S_IMODE(found.st_mode))
        os.replace(name, path)
        name = None
    except OSError as error:
        raise PatchError(
            f"cannot write {path} ({error.strerror}), so nothing was changed; make its folder "
            "writable"
        ) from None
    finally:
        if name is not None:
            os.unlink(name)
