"""Units: slices of microbatches, numbered through, and what each costs.

A *slice* is a run of consecutive tokens of a microbatch, a *unit* one slice of one microbatch. The
units of microbatch 0 come first, in the order of its tokens, then those of microbatch 1. A unit's
number stands in the place of the microbatch in every action.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import isqrt, lcm
from typing import NamedTuple

from .actions import Action, AnyAction, Joint, Operation

SHARE = 1 << 12  # a whole microbatch's F, and its size, in the costs of slices
MOST_UNITS = 1 << 16


class UnitCosts(NamedTuple):
    """Of one unit, in parts of a whole microbatch's.

    Attributes:
        forward, backward_input, backward_weight: factors of the passes' durations.
        size: of its activation set, in the unit of the caps.
        left: of its set, what its W (or BW) does not free; less than 0: it frees others' too.
    """

    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1
    size: int = 1
    left: int = 0

    @property
    def freed(self) -> int:
        """By its W (or BW)."""
        return self.size - self.left


class Unit(int):
    """A unit's number, which prints as ``MICROBATCH/SLICE``.

    Attributes:
        microbatch, slice: which one it is.
    """

    microbatch: int
    slice: int

    def __new__(cls, number: int, microbatch: int, slice_: int) -> Unit:
        """The slice of a microbatch that has several."""
        unit = super().__new__(cls, number)
        unit.microbatch, unit.slice = microbatch, slice_
        return unit

    def __str__(self) -> str:
        return f"{self.microbatch}/{self.slice}"

    def __reduce__(self) -> tuple[type[Unit], tuple[int, int, int]]:
        return type(self), (int(self), self.microbatch, self.slice)


class Whole(Unit):
    """The only unit of its microbatch, which prints as that."""

    def __str__(self) -> str:
        return str(self.microbatch)


def units_of(slices: Sequence[int]) -> tuple[Unit, ...]:
    """All units.

    Args:
        slices: of every microbatch, 1 or more.
    """
    places = [(count, j, k) for j, count in enumerate(slices) for k in range(count)]
    return tuple(
        (Unit if count > 1 else Whole)(number, j, k) for number, (count, j, k) in enumerate(places)
    )


def check_slices(slices: int | Sequence[int], microbatches: int) -> tuple[int, ...]:
    """``slices`` of every microbatch, given as one number or as one each; empty where none is cut.

    Raises:
        ValueError: not one number >= 1 each, or too many in all.
    """
    if isinstance(slices, int):
        if slices == 1:
            return ()
        slices = (slices,) * min(microbatches, MOST_UNITS + 1)
    elif len(slices) != microbatches:
        raise ValueError(
            f"slices are given for {len(slices)} microbatches, but there are {microbatches}; give "
            "one number for all of them or one each"
        )
    if min(slices) < 1:
        raise ValueError(f"a microbatch has 1 slice or more, got {min(slices)}")
    if sum(slices) > MOST_UNITS:
        raise ValueError(
            f"{sum(slices)} slices in all are more than {MOST_UNITS}, the most that are made; "
            "give fewer"
        )
    return tuple(slices) if max(slices) > 1 else ()


def falls(op: Operation) -> bool:
    """True if the slices of a microbatch run in reverse: in backward passes, each of which needs
    the gradients that the slice behind it leaves, also in those of a sharded vocabulary."""
    return op.value in ("B", "W", "BW", "T", "G")


def place_in_lane(op: Operation, unit: int) -> tuple[int, int]:
    """Sorts the passes of one operation and stage: microbatches rise; slices rise or fall."""
    if not isinstance(unit, Unit):
        return unit, 0
    return unit.microbatch, -unit.slice if falls(op) else unit.slice


def named(rows: Iterable[Iterable[AnyAction]], units: Sequence[int]) -> list[list[AnyAction]]:
    """The same actions with ``units`` in the place of their numbers."""

    def one(action: Action) -> Action:
        return Action(action.op, action.stage, units[action.microbatch])

    return [[Joint(*map(one, a)) if isinstance(a, Joint) else one(a) for a in row] for row in rows]


def joined(costs: Sequence[UnitCosts], slices: Sequence[int]) -> list[UnitCosts]:
    """The same with one W a microbatch, in the place of that of its first slice, whose B is the
    last; the other W's take no time and free nothing."""
    found: list[UnitCosts] = []
    given = iter(costs)
    for count in slices:
        own = [next(given) for _ in range(count)]
        weight, size = (sum(one[field] for one in own) for field in (2, 3))
        first, *others = own
        found.append(first._replace(backward_weight=weight, left=first.size - size))
        found += [one._replace(backward_weight=0, left=one.size) for one in others]
    return found


def integers(shares: Sequence[Sequence[Fraction]]) -> tuple[list[UnitCosts], int]:
    """Shares of a whole microbatch as integers, and the whole."""
    whole = lcm(*(x.denominator for row in shares for x in row))
    return [UnitCosts(*(int(x * whole) for x in row)) for row in shares], whole


def even_costs(slices: Sequence[int]) -> tuple[list[UnitCosts], int]:
    """Of equal slices of equal microbatches, and the whole."""
    whole = lcm(*slices)
    return [UnitCosts(*(whole // k,) * 4) for k in slices for _ in range(k)], whole


def slice_costs(
    slices: int,
    attention: Fraction | int = 0,
    *,
    length: Fraction | int = 1,
) -> list[UnitCosts]:
    """Costs of a microbatch's slices, whose F's take equally long under causal attention, as
    integer shares of ``SHARE``.

    Args:
        slices: 1 or more.
        attention: a, the share of core attention in F, from 0 to 1.
        length: of this microbatch; 1 is that whose F takes ``SHARE``.
    """
    a, ends = Fraction(attention), ends_of(slices, attention, length=length)
    return [
        UnitCosts(*(max(1, round(x * SHARE)) for x in (f, (1 + a) * b, (1 - a) * size, size)))
        for f, b, size in times_of(ends, a)
    ]


def ends_of(
    slices: int,
    attention: Fraction | int,
    *,
    length: Fraction | int = 1,
) -> list[Fraction]:
    """Where ``slice_costs`` cuts a microbatch, from 0 to ``length``."""
    a, length = Fraction(attention), Fraction(length)
    if not a:
        return [length * k / slices for k in range(slices + 1)]
    whole = (1 - a) * length + a * length * length
    return [_cut(whole * k / slices, a) for k in range(slices + 1)]


def times_of(
    ends: Sequence[Fraction], attention: Fraction
) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """``times`` of the slices between ``ends``, the first of which is 0: what a slice from x to y
    attends to, its prefix, is y^2 - x^2 of a whole microbatch's."""
    return (times(y - x, y * y - x * x, attention) for x, y in pairwise(ends))


def times(
    tokens: Fraction | int, pairs: Fraction | int, attention: Fraction
) -> tuple[Fraction, Fraction, Fraction]:
    """The shares of a whole microbatch's F, B and W that a part of it takes, or another one.

    Its F takes 1, B 1 + a and W 1 - a: attention has no weights, and its backward pass takes twice
    as long as its forward one. All else, and memory, grow with the tokens.

    Args:
        tokens, pairs: shares of its tokens, and of its pairs of tokens that attend to each other.
        attention: a, the share of core attention in its F.
    """
    linear, square = (1 - attention) * tokens, attention * pairs
    return linear + square, (linear + 2 * square) / (1 + attention), Fraction(tokens)


def shares_of(
    slices: Sequence[int],
    attention: Fraction,
    factors: Sequence[Sequence[Fraction]] | None = None,
    overhead: Fraction = Fraction(0),
) -> tuple[tuple[Fraction, ...], ...] | None:
    """Of every unit, what it takes of a whole microbatch's F, B, W and set; None: equal slices.

    Args:
        slices: of every microbatch.
        attention: the share of core attention in a whole F.
        factors: of each microbatch F, B and W; its set is as large as its W is long, since both
            grow with its tokens alone. None: 1.
        overhead: of a whole W, what the W of every slice takes however short it is.
    """
    if factors is None and (max(slices) == 1 or not (attention or overhead)):
        return None
    rows = []
    for j, count in enumerate(slices):
        costs = [one[:4] for one in slice_costs(count, attention)]
        f, b, w = (Fraction(1),) * 3 if factors is None else factors[j]
        sums = [sum(column) for column in zip(*costs)]
        for one in costs:
            forward, backward, weight, size = (Fraction(x, n) for x, n in zip(one, sums))
            weight = (1 - overhead) * weight + overhead
            rows.append((f * forward, b * backward, w * weight, w * size))
    return tuple(rows)


def _cut(time: Fraction, a: Fraction) -> Fraction:
    """Where the F of all tokens before has taken so long: (1 - a)x + a x^2."""
    root = Fraction(isqrt(int(((1 - a) ** 2 + 4 * a * time) * SHARE**4)), SHARE**2)
    return (root - (1 - a)) / (2 * a)
