"""Data iterators that are read ahead of a step, and give its microbatches in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ConfigError
from ...utils import Wrappers
from .rules import DRAWN, ENOUGH, NEXT


class Ahead:
    """A data iterator whose microbatches of a step are known before the step draws them.

    Args:
        source: the script's iterator of one model chunk.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._read: list[Any] = []
        self._order: Sequence[int] = ()
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def peek(self, microbatches: int) -> list[Any]:
        """All of the next step, which the script gets later.

        Raises:
            ConfigError: the iterator ends before.
        """
        self._fill(microbatches)
        return self._read[:microbatches]

    def begin(self, order: Sequence[int]) -> None:
        """A step begins.

        Args:
            order: the number of the microbatch in every place.
        """
        self._order, self._given = order, 0

    def __next__(self) -> Any:
        if self._given == len(self._order):
            raise self._counted(self._given + 1)
        number = self._order[self._given]
        self._fill(number + 1)
        self._given += 1
        batch, self._read[number] = self._read[number], None
        return batch

    def end(self) -> None:
        """The step has ended.

        Raises:
            ConfigError: the script has not drawn one for each microbatch: some would be lost, or
                come in another step.
        """
        if self._given not in (0, len(self._order)) or (self._read and not self._given):
            raise self._counted(self._given)
        self.drop()

    def drop(self) -> None:
        """Forget the step."""
        self._read, self._order, self._given = [], (), 0

    def _fill(self, count: int) -> None:
        while len(self._read) < count:
            try:
                self._read.append(next(self.source))
            except StopIteration:
                raise ENOUGH.broken(count=len(self._read)) from None

    def _counted(self, drawn: int) -> ConfigError:
        return DRAWN.broken(drawn=drawn, microbatches=len(self._order))


class Queues(Wrappers):
    """The iterators of a call, each in its ``Ahead``."""

    def __init__(self) -> None:
        super().__init__(Ahead)

    def over(self, iterators: Sequence[Any]) -> list[Any]:
        """``iterators``, wrapped.

        Raises:
            ConfigError: one cannot be read.
        """
        for one in iterators:
            read = one is None or hasattr(one, "__next__")
            NEXT.require(read, kind=type(one).__name__)
        return super().over(iterators)
