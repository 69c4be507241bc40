"""Units: the slices of microbatches, numbered one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Units:
    """How the microbatches of a step are cut into slices of consecutive tokens.

    A unit is one slice of one microbatch. Units are numbered microbatch by
    microbatch, slice by slice; without slices a unit's number is its microbatch.

    Attributes:
        microbatches: microbatches of the step, 1 or more.
        slices: slices of each microbatch, one number a microbatch; empty: 1 each.

    Raises:
        ValueError: `slices` has another length, or a number below 1.
    """

    microbatches: int
    slices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.slices and len(self.slices) != self.microbatches:
            raise ValueError(
                f"{len(self.slices)} numbers of slices for {self.microbatches} microbatches; "
                "give one number, or one a microbatch"
            )
        if any(count < 1 for count in self.slices):
            raise ValueError(
                f"a microbatch has {min(self.slices)} slices; every microbatch needs at least 1"
            )

    @classmethod
    def of(cls, microbatches: int, slices: int | Sequence[int] = 1) -> Units:
        """Units with `slices` a microbatch, or with one number for each; all 1: unsliced."""
        each = (slices,) * microbatches if isinstance(slices, int) else tuple(slices)
        units = cls(microbatches, each)
        return cls(microbatches) if all(count == 1 for count in each) else units

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """The first unit of each microbatch, then the number of units."""
        return tuple(accumulate(self.slices or (1,) * self.microbatches, initial=0))

    @property
    def count(self) -> int:
        """Units of the step."""
        return self._first[-1]

    def microbatch(self, unit: int) -> int:
        """The microbatch of a unit."""
        return bisect_right(self._first, unit) - 1

    def slice(self, unit: int) -> int:
        """The slice of its microbatch that a unit is."""
        return unit - self._first[self.microbatch(unit)]

    def number(self, microbatch: int, slice_: int = 0) -> int:
        """The unit of a slice of a microbatch."""
        return self._first[microbatch] + slice_
