"""What microbatches of different lengths cost beside one of a known length, in rounded shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ..schedule.units import SHARE, ends_of, times
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
) -> tuple[tuple[Shares, ...], ...]:
    """Of each microbatch, for each of its slices, the shares of a whole one's F, B, W and set.

    By ``units.times``; attention grows with the pairs of tokens that attend to each other.

    Args:
        loads: of the microbatches.
        whole: of the microbatch whose times are known.
        hidden: h.
        counts: slices of each microbatch; None: it is not cut.
    """
    of_whole = attention_share(Fraction(whole.squares, whole.tokens), hidden)
    found: list[tuple[Shares, ...]] = []
    for number, load in enumerate(loads):
        tokens, pairs = Fraction(load.tokens, whole.tokens), Fraction(load.squares, whole.squares)
        if counts is None:
            found.append(((*_shares(tokens, pairs, of_whole, GRAIN), _up(tokens, GRAIN)),))
            continue
        held = _up(tokens, GRAIN)
        tokens, pairs = _rounded(tokens, GRAIN), _rounded(pairs, GRAIN)
        own = attention_share(whole.squares * pairs / (whole.tokens * tokens), hidden)
        found.append(
            tuple(
                (
                    *_shares(tokens * (y - x), pairs * (y * y - x * x), of_whole, SHARE),
                    max(Fraction(1, SHARE), _up(held * y, SHARE) - _up(held * x, SHARE)),
                )
                for x, y in pairwise(ends_of(counts[number], own))
            )
        )
    return tuple(found)


def rising(units: Sequence[Sequence[Shares]]) -> list[int]:
    """The numbers of microbatches, least work first; the same lengths give the same units."""
    works = [sum((sum(row) for row in rows), Fraction(0)) for rows in units]
    return sorted(range(len(units)), key=lambda j: (works[j], units[j], j))


def _shares(
    tokens: Fraction, pairs: Fraction, attention: Fraction, grain: int
) -> tuple[Fraction, Fraction, Fraction]:
    """Of F, B and W, in parts of ``grain``."""
    forward, backward, weight = (_rounded(x, grain) for x in times(tokens, pairs, attention))
    return forward, backward, weight


def _rounded(share: Fraction, grain: int) -> Fraction:
    return Fraction(max(1, round(share * grain)), grain)


def _up(share: Fraction, grain: int) -> Fraction:
    """Of a set: rounded down, more than a cap allows would fit in it."""
    return Fraction(math.ceil(share * grain), grain)
