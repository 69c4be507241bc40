"""Data iterators that are read ahead of a step, and give its microbatches in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ConfigError


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
                raise ConfigError(
                    f"the data iterator ended after {len(self._read)} microbatches of a step"
                ) from None

    def _counted(self, drawn: int) -> ConfigError:
        return ConfigError(
            "orders by lengths need one microbatch of the data iterator for each forward step, but "
            f"{drawn} were drawn for {len(self._order)} microbatches"
        )
