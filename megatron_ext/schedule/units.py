"""Units: the slices of microbatches, numbered one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import isqrt

from .tasks import UnitCosts

SHARE = 1 << 12  # a whole microbatch's F, and its size, in the costs of slices


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


def slice_costs(
    slices: int, attention: Fraction | int = 0, *, even: bool = False
) -> list[UnitCosts]:
    """Costs of a microbatch's slices under causal attention, as integer shares of ``SHARE``.

    Of a whole microbatch F takes 1, B 1 + a and W 1 - a times a third of the work: attention has no
    weights, and its backward pass takes twice as long as its forward one. A slice from x to y takes
    (1 - a)(y - x) of an F for what grows with its length, and a(y^2 - x^2) for attention to its
    prefix.

    Args:
        slices: 1 or more.
        attention: a, the share of core attention in F, from 0 to 1.
        even: cut into equal lengths; else F's take equally long.
    """
    a = Fraction(attention)
    ends = [Fraction(k, slices) for k in range(slices + 1)]
    if not even and a:
        ends = [_cut(share, a) for share in ends]
    found = []
    for x, y in pairwise(ends):
        linear, square = (1 - a) * (y - x), a * (y * y - x * x)
        parts = (linear + square, linear + 2 * square, linear, y - x)
        found.append(UnitCosts(*(max(1, round(part * SHARE)) for part in parts)))
    return found


def _cut(share: Fraction, a: Fraction) -> Fraction:
    """Where the F of all tokens before has taken this share: (1 - a)x + a x^2."""
    root = Fraction(isqrt(int(((1 - a) ** 2 + 4 * a * share) * SHARE**4)), SHARE**2)
    return (root - (1 - a)) / (2 * a)
