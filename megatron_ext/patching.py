"""The patch series for a Megatron-LM checkout: applied whole or not at all, taken back to the byte.

A series is a folder ``patches/<tag>/`` of plain ``git apply`` patches and ``manifest.json``, which
gives the git blob hash of every file they touch, before and after. The hashes decide everything:
which state a checkout is in, whether a patch fits, and whether what it makes is right. So neither
git nor a ``.git`` folder is needed, and nothing is applied "with an offset".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = "megatron-ext-patches/1"
MANIFEST = "manifest.json"
PACKAGE_INFO = "megatron/core/package_info.py"

NOT_APPLIED = "not applied"
APPLIED = "applied"
PARTIAL = "partially applied"
MODIFIED = "modified"


class PatchError(Exception):
    """A checkout cannot be patched; the text is one sentence for the user. Nothing was changed."""


@dataclass(frozen=True)
class Series:
    """The patches for one Megatron-LM version.

    Attributes:
        tag: of Megatron-LM, e.g. ``core_v0.19.0``.
        version: what ``megatron/core/package_info.py`` says there, e.g. ``0.19.1``.
        patches: the patch files, in the order in which they are applied.
        files: path in the checkout -> git blob hash (before, after).
    """

    tag: str
    version: str
    patches: tuple[Path, ...]
    files: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Status:
    """What a checkout is: ``state`` is one of the constants above, ``files`` has each file's."""

    checkout: Path
    version: str
    series: Series
    state: str
    files: Mapping[str, str]


def patches_folder() -> Path:
    """Where the series are: inside an installed package, beside it in the repository."""
    package = Path(__file__).resolve().parent
    for folder in (package / "patches", package.parent / "patches"):
        if folder.is_dir():
            return folder
    raise PatchError(
        f"the patches are missing from {package} and from beside it; reinstall megatron_ext"
    )


def load_all(folder: Path | None = None) -> list[Series]:
    """Every series in ``folder`` (default: ours), oldest version first."""
    folder = folder or patches_folder()
    found = [load(path.parent) for path in folder.glob(f"*/{MANIFEST}")]
    return sorted(found, key=lambda series: _line(series.version))


def load(folder: Path) -> Series:
    """The series of one folder.

    Raises:
        ValueError: the manifest is of another format.
    """
    data = json.loads((folder / MANIFEST).read_text())
    if data.get("format") != FORMAT:
        raise ValueError(f"{folder / MANIFEST} is not of the format {FORMAT}")
    return Series(
        data["tag"],
        data["version"],
        tuple(folder / name for name in data["patches"]),
        {path: (hashes["before"], hashes["after"]) for path, hashes in data["files"].items()},
    )


def status(checkout: Path, folder: Path | None = None) -> Status:
    """Which version ``checkout`` is, and whether the patches for it are in.

    Raises:
        PatchError: no checkout, or of a version that there are no patches for.
    """
    version = read_version(checkout)
    known = load_all(folder)
    series = next((s for s in known if _line(s.version) == _line(version)), None)
    if series is None:
        tags = ", ".join(s.tag for s in known)
        raise PatchError(
            f"{checkout} is Megatron {version}, and there are patches for {tags} only; check out "
            "one of these"
        )
    files = {path: _state(checkout, path, series.files[path]) for path in series.files}
    states = set(files.values())
    if states <= {NOT_APPLIED, APPLIED}:
        state = states.pop() if len(states) == 1 else PARTIAL
    else:
        state = MODIFIED
    return Status(checkout, version, series, state, files)


def apply(checkout: Path, folder: Path | None = None) -> Status:
    """Apply the series of the checkout's version: all of it, or nothing.

    Raises:
        PatchError: it does not fit, or is there already.
    """
    found = status(checkout, folder)
    _require_unmodified(found)
    if found.state == APPLIED:
        raise PatchError(
            f"{checkout} has the {found.series.tag} patches already; nothing to do (`megatron-ext "
            "patch revert` takes them out)"
        )
    if found.state == PARTIAL:
        done = sum(state == APPLIED for state in found.files.values())
        raise PatchError(
            f"{checkout} has only {done} of {len(found.files)} files patched, as after an "
            "interrupted run; run `megatron-ext patch revert` on it first"
        )
    contents = {path: (checkout / path).read_bytes() for path in found.files}
    for patch in found.series.patches:
        _patch(contents, patch, reverse=False)
    _verify(contents, found, 1)
    _replace_all(checkout, contents)
    return status(checkout, folder)


def revert(checkout: Path, folder: Path | None = None) -> Status:
    """Give every patched file its original bytes back, also after an interrupted run.

    Raises:
        PatchError: the patches are not there, or the files were changed since.
    """
    found = status(checkout, folder)
    _require_unmodified(found)
    if found.state == NOT_APPLIED:
        raise PatchError(f"{checkout} has none of the {found.series.tag} patches; nothing to do")
    contents = {
        path: (checkout / path).read_bytes()
        for path, state in found.files.items()
        if state == APPLIED
    }
    for patch in reversed(found.series.patches):
        _patch(contents, patch, reverse=True)
    _verify(contents, found, 0)
    _replace_all(checkout, contents)
    return status(checkout, folder)


def read_version(checkout: Path) -> str:
    """Version of a checkout, e.g. ``0.19.1``, read without running anything of it.

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
        raise PatchError(f"{checkout}/{PACKAGE_INFO} does not say which version of Megatron it is")
    return ".".join(number[1] for number in numbers if number)


def blob_hash(data: bytes) -> str:
    """What ``git hash-object`` prints for a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _line(version: str) -> tuple[int, int]:
    """``0.19.1`` -> (0, 19): releases of one line often have the same file; the hash decides."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _state(checkout: Path, name: str, hashes: tuple[str, str]) -> str:
    path = checkout / name
    if path.parent.resolve() != (checkout.resolve() / name).parent:
        return "behind a link"  # what it leads to may be another checkout's
    if path.is_symlink() or not path.is_file():
        return "a link" if path.is_symlink() else "missing"
    found = blob_hash(path.read_bytes())
    return {hashes[0]: NOT_APPLIED, hashes[1]: APPLIED}.get(found, MODIFIED)


def _require_unmodified(found: Status) -> None:
    for path, state in found.files.items():
        if state in (NOT_APPLIED, APPLIED):
            continue
        what = "has changes of its own" if state == MODIFIED else f"is {state}"
        raise PatchError(
            f"{path} {what} in {found.checkout} (Megatron {found.version}; expected is the file of "
            f"{found.series.tag}, patched or not), so nothing was changed; put your changes aside, "
            "or train with `python -m megatron_ext.launch`, which needs no patch"
        )


def _verify(contents: Mapping[str, bytes], found: Status, side: int) -> None:
    """Check that patching made what the manifest promises; ``side`` 0: before, 1: after."""
    for path, data in contents.items():
        if blob_hash(data) != found.series.files[path][side]:
            raise _damaged(found.series.patches[0].parent, f"they give another {path}")


def _damaged(folder: Path, what: str) -> PatchError:
    return PatchError(
        f"the patches in {folder} do not go with their {MANIFEST} ({what}), so nothing was "
        "changed; reinstall megatron_ext"
    )


def _patch(contents: dict[str, bytes], patch: Path, *, reverse: bool) -> None:
    """Apply one patch file to ``contents``, which has (some of) the files that it names."""
    for path, hunks in _read(patch):
        if path not in contents:
            continue
        lines = _lines(contents[path])
        for hunk in hunks:
            take, put = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
            at = hunk.old_at if reverse else hunk.new_at
            if lines[at : at + len(take)] != take:
                raise _damaged(patch.parent, f"{patch.name} does not fit {path}")
            lines[at : at + len(take)] = put
        contents[path] = b"".join(lines)


@dataclass
class _Hunk:
    """Lines that one side has where the other has others; ``_at``: index of the first."""

    old_at: int
    new_at: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


def _read(patch: Path) -> list[tuple[str, list[_Hunk]]]:
    """(file, its hunks) of a patch. Series only change files; none makes or deletes one."""
    files: list[tuple[str, list[_Hunk]]] = []
    hunk, old, new = _Hunk(0, 0), 0, 0
    for line in _lines(patch.read_bytes()):
        kind, text = line[:1], line[1:]
        if old or new:
            if kind in b" -":
                hunk.old.append(text)
                old -= 1
            if kind in b" +":
                hunk.new.append(text)
                new -= 1
            if kind not in b" -+" or min(old, new) < 0:
                raise _damaged(patch.parent, f"{patch.name} has {line!r} inside a hunk")
        elif line.startswith(b"+++ "):
            files.append((line[6:].decode().rstrip("\n"), []))
        elif found := _HUNK.match(line):
            starts = int(found[1]), int(found[3])
            old, new = (1 if n is None else int(n) for n in (found[2], found[4]))
            # Of an empty side, a patch names the line before.
            hunk = _Hunk(starts[0] - (old > 0), starts[1] - (new > 0))
            files[-1][1].append(hunk)
    return files


_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; unlike splitlines(), only a newline ends one, as for git."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def _replace_all(checkout: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files or none: each is replaced in one step, and put back if a later one fails."""
    staged: list[tuple[Path, Path, Path]] = []
    replaced: list[tuple[Path, Path]] = []
    try:
        for name, data in contents.items():
            target = checkout / name
            staged.append((target, _stage(target, data), _stage(target, target.read_bytes())))
        for target, new, old in staged:
            # Listed first: if an interrupt falls in between, putting back the same is harmless.
            replaced.append((target, old))
            os.replace(new, target)
    except BaseException as error:
        for target, old in replaced:
            os.replace(old, target)
        if isinstance(error, OSError):
            raise PatchError(
                f"cannot write {error.filename} ({error.strerror}), so nothing was changed; make "
                f"{checkout} writable"
            ) from None
        raise
    finally:
        for _, new, old in staged:
            new.unlink(missing_ok=True)
            old.unlink(missing_ok=True)


def _stage(target: Path, data: bytes) -> Path:
    """Write ``data`` beside ``target``, with its mode and owner, ready to replace it."""
    found = target.stat()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        if (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
            os.chown(name, found.st_uid, found.st_gid)
        os.chmod(name, stat.S_IMODE(found.st_mode))
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
