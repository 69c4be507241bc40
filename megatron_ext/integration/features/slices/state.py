"""Which slice runs now, and what is held for the slices of its microbatch."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ....runtime.draws import Draws
from ....schedule.spec import Cut
from ....schedule.units import Unit

T = TypeVar("T")


class Cuts:
    """Where the microbatches of one iteration are cut.

    Args:
        of: of each microbatch, the cut of its sequence if that has so many tokens.
        tokens: of a microbatch that does not say.
    """

    def __init__(self, of: Sequence[Callable[[int], Cut]], tokens: int) -> None:
        self._of, self._tokens = of, tokens
        self._found: dict[tuple[int, int], Cut] = {}
        self._documents: dict[tuple[int, int], Sequence[int]] = {}

    def get(self, chunk: int, microbatch: int) -> Cut:
        """Of a microbatch in a model chunk."""
        return self._found.get((chunk, microbatch)) or self.of(microbatch, self._tokens)

    def of(self, microbatch: int, tokens: int) -> Cut:
        """Of a microbatch, if its sequence has so many tokens."""
        return self._of[microbatch](tokens)

    def set(self, chunk: int, microbatch: int, tokens: int) -> None:
        """A microbatch has so many tokens."""
        self._found[chunk, microbatch] = self.of(microbatch, tokens)

    def documents(self, chunk: int, microbatch: int) -> Sequence[int]:
        """Where the documents packed in a microbatch begin, and the last ends; empty: none are."""
        return self._documents.get((chunk, microbatch), ())

    def pack(self, chunk: int, microbatch: int, edges: Sequence[int]) -> None:
        """A microbatch has documents between these ``edges``."""
        self._documents[chunk, microbatch] = edges

    def share(self, chunk: int, unit: Unit) -> float:
        """Of a unit, what it has of its microbatch's tokens."""
        cut = self.get(chunk, unit.microbatch)
        return cut.lengths[unit.slice] / cut.ends[-1]


class Slicing:
    """Which slice runs now, and what is held for it.

    Attributes:
        now: (model chunk, unit) of the pass that runs; None outside of training.
        first: it is the unit's F, not its B, which may compute parts of F again.
        stays: takes tensors that outlive the sets which save parts of them.
        draws: of the script's forward step, until it calls the model; None: not looked at.
    """

    def __init__(self) -> None:
        self.now: tuple[int, Unit] | None = None
        self.first = False
        self.stays: Callable[[torch.Tensor], None] | None = None
        self.draws: Draws | None = None
        self._cuts: Cuts | None = None
        self._held: dict[tuple[int, int, str, int, int], Any] = {}
        self._calls: dict[tuple[str, int], int] = {}

    @contextlib.contextmanager
    def at(self, cuts: Cuts, chunk: int, unit: Unit, first: bool) -> Iterator[None]:
        """Around F of a unit (``first``), and its B."""
        before = self.now, self.first, self._cuts
        self.now, self.first, self._cuts = (chunk, unit), first, cuts
        self._calls.clear()
        self.draws = None
        try:
            yield
        finally:
            self.now, self.first, self._cuts = before

    def sequence(self, tokens: int) -> None:
        """The microbatch of the pass that runs has so many tokens."""
        assert self.now is not None and self._cuts is not None
        chunk, unit = self.now
        self._cuts.set(chunk, unit.microbatch, tokens)

    def pack(self, edges: Sequence[int]) -> None:
        """The microbatch of the pass that runs has documents between these ``edges``."""
        assert self.now is not None and self._cuts is not None
        chunk, unit = self.now
        self._cuts.pack(chunk, unit.microbatch, edges)

    @property
    def documents(self) -> Sequence[int]:
        """Edges of the documents packed in the microbatch; empty: none are."""
        assert self.now is not None and self._cuts is not None
        chunk, unit = self.now
        return self._cuts.documents(chunk, unit.microbatch)

    @property
    def prefix(self) -> int:
        """Tokens before the slice that it attends to: all, or those of the document it cuts."""
        begin, edges = self.span[0], self.documents
        return begin - edges[bisect_right(edges, begin) - 1] if edges else begin

    @property
    def unit(self) -> Unit:
        """Of the pass that runs."""
        assert self.now is not None
        return self.now[1]

    @property
    def cut(self) -> Cut:
        """Of its microbatch."""
        assert self.now is not None and self._cuts is not None
        chunk, unit = self.now
        return self._cuts.get(chunk, unit.microbatch)

    @property
    def span(self) -> tuple[int, int]:
        """First token of the slice, and the first one behind it."""
        ends, number = self.cut.ends, self.unit.slice
        return (ends[number - 1] if number else 0), ends[number]

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return self.cut.ends[-1]

    @property
    def is_last(self) -> bool:
        """True in the microbatch's last slice, by whose F all others have had theirs."""
        return self.unit.slice == len(self.cut.ends) - 1

    def held(self, kind: str, module: Any, make: Callable[[], T]) -> T:
        """What is held of a microbatch for one call of a module: one object for all slices, in F
        and B.

        Args:
            kind: of what is held.
            module: whose n-th call of this kind this is, in the pass that runs.
            make: it, in the first slice.
        """
        assert self.now is not None
        chunk, unit = self.now
        call = self._calls[kind, id(module)] = self._calls.get((kind, id(module)), -1) + 1
        place = chunk, unit.microbatch, kind, id(module), call
        if place not in self._held:
            self._held[place] = make()
        found: T = self._held[place]
        return found

    def ended(self, chunk: int, microbatch: int) -> None:
        """After B of a microbatch's first slice."""
        for place in [p for p in self._held if p[:2] == (chunk, microbatch)]:
            del self._held[place]

    def clear(self) -> None:
        """Forget everything, after an exception."""
        self._held.clear()
        self.now = None

    def calls(self, kind: str) -> int:
        """Modules that have held something of this kind in the pass that runs."""
        return sum(found == kind for found, _ in self._calls)

    @property
    def left(self) -> int:
        """Calls of modules times microbatches for which something is held."""
        return len(self._held)


class Sliced:
    """What all hooks of one run share.

    Attributes:
        slicing: which slice runs now.
    """

    def __init__(self) -> None:
        self.slicing = Slicing()
