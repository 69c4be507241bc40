"""Where a sequence is cut into slices, in tokens, and what each slice costs."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from .costs import Costs
from .units import SHARE, slice_costs


class Cut(NamedTuple):
    """Slices of a sequence, the same for every microbatch.

    Attributes:
        ends: of every slice, in tokens; the last one is the sequence's length.
        attention: the share of core attention in the F of a whole sequence.
    """

    ends: tuple[int, ...]
    attention: Fraction

    @classmethod
    def of(cls, tokens: int, slices: int, attention: Fraction, multiple: int, even: bool) -> Cut:
        """Slices that take equally long, or equal ones, of a multiple of tokens.

        Raises:
            ValueError: there are not as many multiples.
        """
        if tokens % multiple or tokens // multiple < slices:
            raise ValueError(
                f"a sequence of {tokens} tokens does not make {slices} slices of multiples of "
                f"{multiple}"
            )
        blocks, ends, done = tokens // multiple, list[int](), 0
        for number, one in enumerate(slice_costs(slices, attention, even=even)):
            done += one.size
            least = ends[-1] + 1 if ends else 1
            most = blocks - (slices - 1 - number)
            ends.append(min(max(least, round(Fraction(done * blocks, SHARE))), most))
        ends[-1] = blocks
        return cls(tuple(multiple * end for end in ends), attention)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every slice."""
        return [b - a for a, b in zip((0, *self.ends), self.ends)]

    def costs(self, costs: Costs, microbatches: int) -> Costs:
        """``costs`` with those of every unit."""
        tokens, a = self.ends[-1], self.attention
        rows = []
        for begin, end in zip((0, *self.ends), self.ends):
            x, y = Fraction(begin, tokens), Fraction(end, tokens)
            linear, square = (1 - a) * (y - x), a * (y * y - x * x)
            # Attention counts twice in B, and has no weights.
            backward, weight = (linear + 2 * square) / (1 + a), y - x
            rows.append((linear + square, backward, weight, y - x))
        return costs.with_units(rows * microbatches)
