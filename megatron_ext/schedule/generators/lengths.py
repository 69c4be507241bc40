"""Microbatches of different lengths: their costs, and orders of them.

A pipeline fills and drains fastest with short microbatches, and a long one costs least where all
ranks are busy: so short ones stand at both ends, and the longest in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..units import UnitCosts, slice_costs


def length_costs(
    lengths: Sequence[int],
    whole: int,
    attention: Fraction | int = 0,
    *,
    slice_length: int | None = None,
) -> list[list[UnitCosts]]:
    """Costs of the units of every microbatch, as ``Tasks`` takes them.

    A microbatch w times as long as ``whole`` takes (1 - a)w + a w^2 of its F, (1 - a)w + 2a w^2
    for B and (1 - a)w for W, and its sets are w times as large.

    Args:
        lengths: of every microbatch, in tokens.
        whole: tokens of a microbatch whose F takes ``units.SHARE``.
        attention: a, the share of core attention in the F of such a microbatch, from 0 to 1.
        slice_length: tokens; a microbatch is cut into the fewest slices that are no longer than
            this on average. Their F's take equally long, so the first one may be longer. None:
            microbatches stay whole.

    Raises:
        ValueError: a length is not 1 token or more, or the share is not from 0 to 1.
    """
    if not 0 <= attention <= 1:
        raise ValueError(f"the share of attention is from 0 to 1, not {attention}")
    least = min([whole, *lengths, whole if slice_length is None else slice_length])
    if least < 1:
        raise ValueError(f"a length is 1 token or more, not {least}")
    return [
        slice_costs(
            1 if slice_length is None else -(-length // slice_length),
            attention,
            length=Fraction(length, whole),
        )
        for length in lengths
    ]


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
