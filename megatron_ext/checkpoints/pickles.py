"""Reads a pickle as data: nothing that it names is imported, made or called.

Checkpoints describe themselves in pickles. Loading one runs what it names, so a folder that is
only to be looked at is read with this: Python's own unpickler, in which every class or function is
its name and every object the record of what would have been called, with what.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from .._input import shown

# What Python's zipfile answers damaged archives with.
BROKEN_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, NotImplementedError),
    *(OSError, EOFError, OverflowError),
)
# And its unpickler damaged pickles.
_BROKEN_PICKLE = (
    *(pickle.UnpicklingError, ValueError, IndexError, KeyError, TypeError, AttributeError),
    *(EOFError, OverflowError, struct.error, AssertionError),
)


class GlobalRef(NamedTuple):
    """A class, function or value that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class PickledObject:
    """An object that a pickle would make.

    Attributes:
        of: what would be called: usually a ``GlobalRef``.
        state: what it would be given afterwards.
        items: what a mapping or sequence of its own class would hold.
    """

    of: Any
    args: Any = ()
    state: Any = None
    items: dict[Any, Any] | list[Any] | None = None

    @property
    def values(self) -> dict[Any, Any]:
        """The state's attributes; empty if it has another form."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state if isinstance(state, dict) else {}

    # The unpickler calls these for objects that are built in parts.
    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items = self.items if isinstance(self.items, dict) else {}
        self.items[key] = value

    def append(self, item: Any) -> None:
        """Add an element of a sequence."""
        self.extend([item])

    def extend(self, items: Iterable[Any]) -> None:
        """Add elements of a sequence."""
        self.items = self.items if isinstance(self.items, list) else []
        self.items.extend(items)

    # Of what is inside no more than a name: a pickle of some bytes may hold one thing twice, in
    # another one twice, and so on, and printed it would not fit in memory.
    def __repr__(self) -> str:
        of = shown(self.of) if isinstance(self.of, GlobalRef) else "..."
        return f"PickledObject({of})"


@dataclass(eq=False)
class TensorStorageRef:
    """A tensor's memory, which is stored beside the pickle."""

    identifier: Any = field(repr=False)


def read_pickle(data: bytes) -> Any:
    """What a pickle describes.

    Raises:
        ValueError: it is no pickle, is damaged, or uses what no checkpoint uses.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except _BROKEN_PICKLE as error:
        raise ValueError(f"it is no intact pickle ({shown(str(error))})") from None


def read_saved(source: bytes | Path, most_bytes: int) -> Any:
    """What ``torch.save`` has written, a file or its bytes: the pickle in a zip archive.

    Raises:
        ValueError: it is something else, is damaged, or the pickle takes more than ``most_bytes``.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.split("/")[-1] == "data.pkl"]
            if len(names) != 1:
                raise ValueError("it is not what torch.save writes")
            with archive.open(names[0]) as inside:
                content = inside.read(most_bytes + 1)
    except BROKEN_ARCHIVE as error:
        raise ValueError(f"it is not what torch.save writes ({shown(str(error))})") from None
    if len(content) > most_bytes:
        raise ValueError(f"its description takes more than {most_bytes >> 20} MiB")
    return read_pickle(content)


_MOST_PARTS = 1000


# The one that Python has in Python: the one in C allocates what a length claims before it reads.
class _Unpickler(pickle._Unpickler):
    """Python's unpickler without its access to code: no import, no call."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return GlobalRef(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return TensorStorageRef(pid)

    def make(self) -> None:
        """Replace a callable and its arguments by a record of them."""
        args = self.stack.pop()
        self.stack[-1] = PickledObject(self.stack[-1], args)

    def make_with_keywords(self) -> None:
        """The same where keyword arguments are given, too."""
        keywords, args = self.stack.pop(), self.stack.pop()
        self.stack[-1] = PickledObject(self.stack[-1], (args, keywords))

    def check_keys(self, keys: list[Any]) -> None:
        """Refuse keys that take too long to hash.

        For a tuple, Python looks into all parts, however often one thing is in it and however deep.
        """
        for key in keys:
            parts, found = [key], 0
            while parts:
                part = parts.pop()
                if isinstance(part, tuple | frozenset):
                    found += len(part)
                    if found > _MOST_PARTS:
                        raise ValueError(f"a key of more than {_MOST_PARTS} parts")
                    parts.extend(part)


def _restrict(dispatch: dict[int, Callable[..., None]]) -> None:
    """Replace the instructions that call or hash, and remove those that no checkpoint uses: calls
    of protocol 0, registered extensions, and buffers, which may have any size."""
    for code in (
        *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        del dispatch[code[0]]
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _Unpickler.make
    dispatch[pickle.NEWOBJ_EX[0]] = _Unpickler.make_with_keywords

    def checked(load: Callable[..., None], keys: slice) -> Callable[[_Unpickler], None]:
        def load_checked(unpickler: _Unpickler) -> None:
            unpickler.check_keys(unpickler.stack[keys])
            load(unpickler)

        return load_checked

    # Where on the stack the keys are.
    for code, keys in (
        (pickle.SETITEM, slice(-2, -1)),
        (pickle.SETITEMS, slice(None, None, 2)),
        (pickle.DICT, slice(None, None, 2)),
        (pickle.ADDITEMS, slice(None)),
        (pickle.FROZENSET, slice(None)),
    ):
        dispatch[code[0]] = checked(dispatch[code[0]], keys)


_restrict(_Unpickler.dispatch)
