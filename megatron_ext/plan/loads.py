"""What microbatches of different lengths cost beside one of a known length, in rounded shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ..schedule.units import SHARE, ends_of
from .slices import attention_share

Shares = tuple[Fraction, Fraction, Fraction, Fraction]  # of F, B, W and the set
GRAIN = 64  # parts of a whole microbatch that shares are rounded to, so that plans come again


class Load(NamedTuple):
    """The work of a microbatch.

    Attributes:
        tokens: of all its sequences.
        squares: of the lengths of its sequences, added up: attention grows with them.
    """

    tokens: int
    squares: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Load:
        """Of sequences of these lengths, in tokens."""
        held = list(lengths)
        return cls(sum(held), sum(length * length for length in held))

    @property
    def length(self) -> int:
        """Of a sequence, where all are of one length; else a mean."""
        return max(1, round(self.squares / self.tokens))

    def most(self, other: Load) -> Load:
        """The larger one of each."""
        return Load(max(self.tokens, other.tokens), max(self.squares, other.squares))


def shares_of_loads(
    loads: Sequence[Load],
    whole: Load,
    hidden: int,
    counts: Sequence[int] | None = None,
    even: bool = False,
) -> tuple[tuple[Shares, ...], ...]:
    """Of each microbatch, for each of its slices, the shares of a whole one's F, B, W and set.

    A layer's F takes 12 h operations a token and one for each pair of tokens that attend to each
    other (twice, for half of them; see ``slices.attention_share``). B takes two for each pair, W
    none.

    Args:
        loads: of the microbatches.
        whole: of the microbatch whose times are known.
        hidden: h.
        counts: slices of each microbatch; None: it is not cut.
        even: slices are of equal lengths; else they take equally long.
    """
    if counts is None:
        return tuple((_shares(*load, whole, hidden, GRAIN),) for load in loads)
    found = []
    for load, count in zip(loads, counts):
        tokens = whole.tokens * _rounded(Fraction(load.tokens, whole.tokens), GRAIN)
        pairs = whole.squares * _rounded(Fraction(load.squares, whole.squares), GRAIN)
        length = pairs / tokens
        ends = ends_of(count, length / (_operations(hidden) + length), even=even)
        found.append(
            tuple(
                _shares(tokens * (y - x), pairs * (y * y - x * x), whole, hidden, SHARE)
                for x, y in pairwise(ends)
            )
        )
    return tuple(found)


def rising(units: Sequence[Sequence[Shares]]) -> list[int]:
    """The numbers of microbatches, least work first; the same lengths give the same units."""
    works = [sum((sum(row) for row in rows), Fraction(0)) for rows in units]
    return sorted(range(len(units)), key=lambda j: (works[j], units[j], j))


def _shares(
    tokens: Fraction | int, pairs: Fraction | int, whole: Load, hidden: int, grain: int
) -> Shares:
    """Of F, B, W and the set of so many tokens and pairs, in parts of ``grain``."""
    linear = _operations(hidden)
    forward, backward = (
        (linear * tokens + n * pairs) / (linear * whole.tokens + n * whole.squares) for n in (1, 2)
    )
    length = _rounded(Fraction(tokens) / whole.tokens, grain)
    return _rounded(forward, grain), _rounded(backward, grain), length, length


def _operations(hidden: int) -> Fraction:
    """That F takes a token, beside one for each pair."""
    share = attention_share(1, hidden)
    return (1 - share) / share


def _rounded(share: Fraction, grain: int) -> Fraction:
    return Fraction(max(1, round(share * grain)), grain)
