"""A memory cap as people give it, a fraction of 1F1B's peak, in whole activation sets."""

from __future__ import annotations

from fractions import Fraction

from .._input import fraction, shown

_NEAR = Fraction(1, 10**6)  # sets; 0.3333333 of 6 is meant as 2


def parse_cap(text: str) -> Fraction:
    """The fraction in ``text``: ``0.5``, ``1/3``, ``1e-1``.

    Raises:
        ValueError: it is not a number > 0.
    """
    try:
        cap = fraction(text)
    except ValueError:
        cap = Fraction(0)
    if cap <= 0:
        raise ValueError(
            f"a memory cap must be a fraction of 1F1B's peak, a number > 0 such as 0.5, "
            f"got {shown(text)}"
        )
    return cap


def cap_sets(cap: Fraction, pp: int, chunks: int) -> int:
    """``cap`` times 1F1B's peak, which is pp microbatches or pp * chunks activation sets.

    Rounded to the nearest whole number where that is within 1e-6 sets, else down.

    Raises:
        ValueError: that is less than one set, so no pass could run.
    """
    exact = cap * pp * chunks
    sets = int(exact + _NEAR)  # positive, so int() rounds down
    if sets < 1:
        raise ValueError(
            f"a memory cap of {float(cap):g} is {float(exact):g} of 1F1B's {pp * chunks} "
            f"activation sets at pp={pp}, chunks={chunks}; give at least "
            f"{float(Fraction(1, pp * chunks)):g}, one set"
        )
    return sets
