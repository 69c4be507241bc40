"""Reads a pickle as data: nothing that it names is imported, made or called.

Checkpoints describe themselves in pickles. Loading one runs what it names, so a folder that is
only to be looked at is read with this. What a pickle would have made is a ``Made``: the name of a
class or function, what it would have been called with, and the state it would have been given.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .._input import shown

# What Python's zipfile answers damaged archives with.
BROKEN_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, NotImplementedError),
    *(OSError, EOFError, OverflowError),
)


class Name(NamedTuple):
    """A class, function or value that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that a pickle would make.

    Attributes:
        of: what would be called: usually a ``Name``.
        args: with this.
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

    # Of what is inside no more than a name: a pickle of some bytes may hold one thing twice, in
    # another one twice, and so on, and printed it would not fit in memory.
    def __repr__(self) -> str:
        return f"Made({shown(self.of) if isinstance(self.of, Name) else '...'})"


@dataclass(eq=False)
class Stored:
    """A tensor's memory, which lies beside the pickle."""

    identifier: Any = field(repr=False)


def read_pickle(data: bytes) -> Any:
    """What a pickle describes.

    Raises:
        ValueError: it is no pickle, is damaged, or uses what no checkpoint uses.
    """
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return reader.stack[-1]
            reader.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is no intact pickle ({shown(str(error))})") from None
    raise ValueError("it is no intact pickle (it has no end)")


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


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING", "STRING"),
}
_NOTHING = ("PROTO", "FRAME")
_MOST_PARTS = 1000


@dataclass
class _Reader:
    """The pickle machine, as far as checkpoints use it."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name not in _NOTHING:
            handler = getattr(self, f"_{name.lower()}", None)
            if handler is None:
                raise ValueError(f"instruction {name}")
            handler() if argument is None else handler(argument)

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _pop(self) -> None:
        self.stack.pop()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _tuple(self) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _tuple1(self) -> None:
        self._last(1)

    def _tuple2(self) -> None:
        self._last(2)

    def _tuple3(self) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def _list(self) -> None:
        self.stack.append(self._since_mark())

    def _dict(self) -> None:
        items = self._since_mark()
        self.stack.append(dict(zip(_keys(items[::2]), items[1::2], strict=True)))

    def _frozenset(self) -> None:
        self.stack.append(frozenset(_keys(self._since_mark())))

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _additems(self) -> None:
        items = self._since_mark()
        if not isinstance(self.stack[-1], set):
            raise ValueError("items of no set")
        self.stack[-1].update(_keys(items))

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items = target.items if isinstance(target.items, list) else []
            target = target.items
        if not isinstance(target, list):
            raise ValueError("items of no list")
        target.extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items = target.items if isinstance(target.items, dict) else {}
            target = target.items
        if not isinstance(target, dict):
            raise ValueError("items of no mapping")
        target.update(zip(_keys(items[::2]), items[1::2], strict=True))

    def _global(self, text: str) -> None:
        module, name = text.split(" ", 1)
        self.stack.append(Name(module, name))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name that is no text")
        self.stack.append(Name(module, name))

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(Made(function, args))

    _newobj = _reduce

    def _newobj_ex(self) -> None:
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Made(cls, (args, kwargs)))

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Made):
            raise ValueError("a state of nothing")
        self.stack[-1].state = state

    def _binpersid(self) -> None:
        self.stack.append(Stored(self.stack.pop()))

    def _persid(self, identifier: str) -> None:
        self.stack.append(Stored(identifier))


def _keys(items: list[Any]) -> list[Any]:
    """``items``, if they can be keys: Python looks into all parts of a tuple, however often one
    thing is in it."""
    for item in items:
        parts, found = [item], 0
        while parts:
            part = parts.pop()
            if isinstance(part, tuple | frozenset):
                found += len(part)
                if found > _MOST_PARTS:
                    raise ValueError(f"a key of more than {_MOST_PARTS} parts")
                parts.extend(part)
    return items
