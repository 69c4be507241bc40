"""Folders of checkpoints: the iterations in them, which are complete, and their contents.

Megatron writes an iteration's files, then ``.metadata``, then ``metadata.json``, and names the
iteration in ``latest_checkpointed_iteration.txt`` last. What is missing shows how far an
interrupted save came.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .._input import shown, whole
from .pickles import GlobalRef, PickledObject, TensorStorageRef, read_pickle, read_saved

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CONFIG, METADATA, COMMON = "metadata.json", ".metadata", "common.pt"
MOST_METADATA_BYTES = 1 << 30
MOST_COMMON_BYTES = 64 << 20
_ITERATION = re.compile(r"iter_(\d{7,})")
_COMMON_KEY = "common_state/shard_0_1"
_LISTED = 3
_SIGNATURE, _ARCHIVE_END = 4, 22  # bytes of a zip file's signature, and of its last record


@dataclass(frozen=True)
class Contents:
    """What ``.metadata`` lists.

    Attributes:
        tensors: name -> (shape, name of the dtype).
        files: file -> bytes that it must at least have.
        common: (file, offset, length) of what is no tensor (arguments, iteration, …); None: in
            ``common.pt``, as Megatron before 0.19 saves it.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    files: Mapping[str, int]
    common: tuple[str, int, int] | None


def tracked(root: Path) -> int | str | None:
    """The iteration (or ``release``) that a run would load; None: there is no tracker file.

    Raises:
        ValueError: the tracker names none.
    """
    try:
        with (root / TRACKER).open(errors="replace") as file:
            text = file.read(100).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{root / TRACKER} cannot be read: {error.strerror}") from None
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(
            f"{root / TRACKER} holds {shown(text)}, and no iteration: writing it was interrupted"
        )
    return int(text)


def saved(root: Path) -> dict[int | str, Path]:
    """The folders of iterations, by iteration, rising; ``release`` last."""
    found: dict[int | str, Path] = {}
    if root.is_dir():
        for path in sorted(root.iterdir()):
            match = _ITERATION.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
        if (root / RELEASE).is_dir():
            found[RELEASE] = root / RELEASE
    return dict(sorted(found.items(), key=lambda item: (item[0] == RELEASE, item[0])))


def iterations(root: Path) -> dict[int | str, Path]:
    """``saved``; of a folder of one iteration itself, that alone under no name.

    Raises:
        ValueError: there is none; the text follows the folder's name.
    """
    if not root.is_dir():
        raise ValueError("is no folder; give the folder of --save")
    if root.name.startswith("iter_") or (root / METADATA).exists():
        return {"": root}
    if not (found := saved(root)):
        raise ValueError("holds no iter_… folder; give the folder of --save")
    return found


def by_rank(folder: Path) -> bool:
    """True for the format ``torch``: one folder a rank."""
    return any(path.name.startswith("mp_rank_") for path in folder.iterdir())


def unfinished(folder: Path) -> str | None:
    """What an interrupted save has not written, from names and sizes of files only."""
    if not folder.is_dir():
        return "its folder is missing"
    if by_rank(folder):
        for path in sorted(folder.glob("mp_rank_*")):
            if not any(zipfile.is_zipfile(file) for file in path.glob("model_optim_rng.pt")):
                return f"{path.name}/model_optim_rng.pt is missing or cut off"
        return None
    for name, last in ((METADATA, "which is written after all data"), (CONFIG, "written last")):
        path = folder / name
        if not path.is_file() or not path.stat().st_size:
            return f"{name}, {last}, is {'empty' if path.is_file() else 'missing'}"
    try:
        with (folder / CONFIG).open(errors="replace") as file:
            config = json.loads(file.read(4096))
        if not isinstance(config, dict):
            raise ValueError
    except (ValueError, RecursionError):
        return f"{CONFIG} is damaged"
    common = folder / COMMON
    return f"{COMMON} is cut off" if common.exists() and not zipfile.is_zipfile(common) else None


def missing(folder: Path, files: Mapping[str, int]) -> str | None:
    """Which of ``files`` (name -> least bytes) are not there, too short, or hold zeros."""
    wrong = []
    for name, least in sorted(files.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            wrong.append(f"{name} is missing")
        elif size < least:
            wrong.append(f"{name} has {size} of {least} bytes")
        elif _zeros(path, least):
            wrong.append(f"{name} holds zeros, as after a crash of the machine during the save")
    more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return "; ".join(wrong[:_LISTED]) + more if wrong else None


def _zeros(path: Path, size: int) -> bool:
    """True where the first or the last of these bytes are zeros, which what Megatron saves has in
    neither place: each tensor is an archive, with its signature at both ends."""
    with path.open("rb") as file:
        ends = [file.read(_SIGNATURE)]
        file.seek(max(0, size - _ARCHIVE_END))
        ends.append(file.read(_ARCHIVE_END))
    return any(end and not any(end) for end in ends)


def contents(folder: Path) -> Contents:
    """What ``.metadata`` lists.

    Raises:
        ValueError: it is damaged, too large, or not what Megatron writes.
    """
    return read_contents(read_bytes(folder / METADATA, MOST_METADATA_BYTES))


def read_contents(data: bytes) -> Contents:
    """What the bytes of a ``.metadata`` list.

    Raises:
        ValueError: they are damaged, or not what Megatron writes.
    """
    metadata = read_pickle(data)
    fields = metadata.values if isinstance(metadata, PickledObject) else {}
    entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise ValueError(f"{METADATA} does not list tensors and files by name; it is damaged")
    original = fields.get("mcore_data")
    kept = original if isinstance(original, dict) else {}
    tensors = {}
    for key, entry in entries.items():
        if isinstance(entry, PickledObject) and _called(entry, "TensorStorageMetadata"):
            tensors[str(key)] = (
                shape(str(key), entry.values.get("size"), kept.get(key)),
                _dtype(entry),
            )
    files: dict[str, int] = {}
    common = None
    for index, place in places.items():
        where = place.values if isinstance(place, PickledObject) else {}
        name = where.get("relative_path")
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{METADATA} names the file {shown(name)}; it is damaged")
        start = whole(where.get("offset"), "an offset", 0, 1 << 60)
        length = whole(where.get("length"), "a length", 0, 1 << 60)
        files[name] = max(files.get(name, 0), start + length)
        key = index.values.get("fqn") if isinstance(index, PickledObject) else None
        if key == _COMMON_KEY:
            common = name, start, length
    return Contents(tensors, files, common)


def problem(
    folder: Path, files: Callable[[Path], Mapping[str, int]] = lambda f: contents(f).files
) -> str | None:
    """Why a run could not load this iteration; None: it is complete.

    Args:
        folder: the iteration's.
        files: file -> bytes that it must at least have, from the folder's metadata; raises
            ``ValueError`` where that is damaged.
    """
    found = unfinished(folder)
    if found is not None or by_rank(folder):
        return found
    try:
        return missing(folder, files(folder))
    except ValueError as error:
        return f"{METADATA} cannot be read: {error}"


def last_complete(found: dict[int | str, Path], but: int | str | None = None) -> int | None:
    """The last complete iteration of ``saved()``, other than ``but``."""
    for number in reversed(found):
        if isinstance(number, int) and number != but and problem(found[number]) is None:
            return number
    return None


def newer(root: Path, found: dict[int | str, Path], wanted: int | str | None) -> str | None:
    """What to say of a complete iteration after the one that the tracker file names."""
    if not isinstance(wanted, int):
        return None
    after: dict[int | str, Path] = {
        n: path for n, path in found.items() if isinstance(n, int) and n > wanted
    }
    last = last_complete(after)
    if last is None:
        return None
    return (
        f"iteration {last} in {root} is complete, but {TRACKER} names {wanted}: saving was "
        f"interrupted at its very end, or the file was changed; --ckpt-step {last} would load it"
    )


def advice(root: Path, last: int | None) -> str:
    """What to do where the iteration to load is incomplete, and ``last`` is complete."""
    if last is None:
        return (
            "no other iteration there is complete: restore this one, or start again without --load"
        )
    return (
        f"the last complete one is {last}: write {last} into {root / TRACKER}, or add "
        f"--ckpt-step {last}"
    )


def common(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors: arguments (a namespace), iteration, …

    Raises:
        ValueError: it cannot be read.
    """
    if by_rank(folder):
        path = next(iter(sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))), None)
        if path is None:
            raise ValueError("it holds no model_optim_rng.pt")
        state = _saved_file(path)
    elif (folder / COMMON).is_file():
        state = _saved_file(folder / COMMON)
    else:
        place = contents(folder).common
        if place is None:
            raise ValueError("it holds no arguments")
        name, start, length = place
        state = read_saved(
            read_bytes(folder / name, MOST_COMMON_BYTES, start, length), MOST_COMMON_BYTES
        )
    if isinstance(state, list) and len(state) == 1:
        state = state[0]
    if not isinstance(state, dict):
        raise ValueError("what it holds besides tensors is no mapping; it is damaged")
    return {**state, "args": _namespace(state.get("args"))}


def _saved_file(path: Path) -> Any:
    """The description in a file of ``torch.save``, whose tensors are not read."""
    try:
        return read_saved(path, MOST_COMMON_BYTES)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def read_bytes(path: Path, most: int, start: int = 0, length: int | None = None) -> bytes:
    """A part of a file, or all of it.

    Raises:
        ValueError: it cannot be read, or is larger than ``most``.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            wanted = most + 1 if length is None else min(length, most + 1)
            data = file.read(wanted)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise ValueError(f"{path.name} is larger than {most >> 20} MiB")
    return data


def _called(made: PickledObject, name: str) -> bool:
    return isinstance(made.of, GlobalRef) and made.of.name == name


def shape(key: str, size: Any, original: Any) -> tuple[int, ...]:
    """Global shape of a tensor in the model, from its entry in the metadata.

    Args:
        size: as it is stored.
        original: Megatron's note of the shape in the model, where it stored another one.

    Raises:
        ValueError: they are not what Megatron writes.
    """
    if isinstance(original, dict):
        size = original.get("nd_reformulated_orig_global_shape", size)
    if isinstance(size, PickledObject) and isinstance(size.args, tuple) and size.args:
        size = size.args[0]
    if not isinstance(size, list | tuple):
        raise ValueError(f"it gives {shown(key)} the shape {shown(size)}; the file is damaged")
    return tuple(whole(n, f"a size of {shown(key)}", 0, 1 << 60) for n in size)


def _dtype(entry: PickledObject) -> str:
    properties = entry.values.get("properties")
    state = properties.state if isinstance(properties, PickledObject) else None
    first = state[0] if isinstance(state, tuple) and state else None
    return first.name if isinstance(first, GlobalRef) else "?"


def _namespace(args: Any) -> SimpleNamespace | None:
    """Saved arguments, with enumerations and dtypes as text; None: there are none."""
    if not isinstance(args, PickledObject):
        return None
    return SimpleNamespace(**{str(k): _plain(v) for k, v in args.values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, GlobalRef):
        return value.name
    if isinstance(value, PickledObject):
        return (
            f"{value.of.name if isinstance(value.of, GlobalRef) else '?'}{shown(value.args)[:60]}"
        )
    return "a tensor" if isinstance(value, TensorStorageRef) else value
