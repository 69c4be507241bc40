"""Memory caps: a limit on what every rank may hold on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from .._input import fraction, shown
from .placement import Placement
from .schedule import Schedule

NEAR = Fraction(1, 10**6)  # sets; 0.3333333 of 6 is meant as 2


class Cap(Protocol):
    """A limit on the device memory of every rank; ``plan.budget.Budget`` has it in bytes."""

    def sets(self, placement: Placement, split_backward: bool) -> int:
        """Activation sets for which every rank has room, whichever they are.

        Raises:
            ValueError: there is no room for one.
        """

    def most_sets(self, placement: Placement) -> int:
        """A number of which no more can be resident on every rank; at least ``sets``."""

    def needed(self, schedule: Schedule) -> Any:
        """What ``schedule`` takes on the rank with most, comparable between schedules."""

    def fits(self, schedule: Schedule) -> bool:
        """True if every rank of ``schedule`` keeps the cap."""

    def amount(self, pp: int) -> str:
        """The cap in words."""

    def detail(self, schedule: Schedule) -> str:
        """What a schedule that fits holds, in words."""

    def taken(self, schedule: Schedule) -> str:
        """``needed`` in words."""

    def binding(self, schedule: Schedule) -> str:
        """Which part of it is the largest, as a relative clause; empty if there is but one."""

    def enough(self, schedule: Schedule) -> str:
        """A cap, as a user gives it, that ``schedule`` keeps."""


@dataclass(frozen=True)
class ShareCap:
    """A cap on activations alone.

    Attributes:
        share: of 1F1B's peak, which is pp microbatches or pp * chunks activation sets; also in
            steps with fewer, so that a run's cap does not change with its batch.
        growth: bytes of a set between B and W, as a multiple of its bytes between F and B, at least
            1: so much counts a set of a schedule that splits B and W.
    """

    share: Fraction
    growth: Fraction = Fraction(1)

    def sets(self, placement: Placement, split_backward: bool) -> int:
        sets = cap_sets(self.share, placement.pp, placement.chunks)
        if self.growth > 1 and split_backward:
            sets = int(self.share * placement.num_stages / self.growth + NEAR)
        if sets < 1:
            raise ValueError(
                f"a memory cap of {float(self.share):g} is less than one activation set, which "
                f"takes {number_text(self.growth)} times its bytes between B and W; give at least "
                f"{math.ceil(self.growth / placement.num_stages * 10**4) / 10**4:g}"
            )
        return sets

    def most_sets(self, placement: Placement) -> int:
        return cap_sets(self.share, placement.pp, placement.chunks)

    def needed(self, schedule: Schedule) -> Fraction:
        counted = self.growth if schedule.splits_backward else 1
        return max(schedule.peak_activation()) * counted

    def fits(self, schedule: Schedule) -> bool:
        return self.needed(schedule) * schedule.chunks <= (
            self.share * schedule.placement.num_stages + NEAR
        )

    def amount(self, pp: int) -> str:
        return f"{number_text(self.share * pp)} microbatches of activations per rank"

    def detail(self, schedule: Schedule) -> str:
        counts = self.growth > 1 and schedule.splits_backward
        more = f" (a set counts {number_text(self.growth)}, as between B and W)" if counts else ""
        return f"peak {number_text(self.needed(schedule))}{more}"

    def taken(self, schedule: Schedule) -> str:
        return number_text(self.needed(schedule))

    def binding(self, schedule: Schedule) -> str:
        return ""

    def enough(self, schedule: Schedule) -> str:
        share = self.needed(schedule) / schedule.pp
        return f"{math.ceil(share * 10**4) / 10**4:g}"  # rounded down, it would not be enough


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
    sets = int(exact + NEAR)  # positive, so int() rounds down
    if sets < 1:
        raise ValueError(
            f"a memory cap of {float(cap):g} is {float(exact):g} of 1F1B's {pp * chunks} "
            f"activation sets at pp={pp}, chunks={chunks}; give at least "
            f"{float(Fraction(1, pp * chunks)):g}, one set"
        )
    return sets


def number_text(value: Fraction | int) -> str:
    """A number for people, four digits at most."""
    value = Fraction(value)
    return str(value) if value.denominator == 1 else f"{float(value):.4g}"
