"""Orders of microbatches of different lengths.

A pipeline fills and drains fastest with short microbatches, and a long one costs least where all
ranks are busy: so short ones stand at both ends, and the longest in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def arranged(lengths: Sequence[float | Fraction]) -> list[int]:
    """The order of microbatches, as their numbers: short ones at both ends, the longest in the
    middle."""
    rising = _rising(lengths)
    return rising[::2] + rising[1::2][::-1]


def arrangements(lengths: Sequence[float | Fraction]) -> list[list[int]]:
    """Orders of microbatches, as their numbers, one of which is nearly always the best: as given,
    as ``arranged``, and rising, which is better for few microbatches a rank."""
    found = [list(range(len(lengths))), arranged(lengths), _rising(lengths)]
    return [order for k, order in enumerate(found) if order not in found[:k]]


def _rising(lengths: Sequence[float | Fraction]) -> list[int]:
    """Equally long ones keep their order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)
