"""How much a search may do: a count that is the same on every machine, about microseconds."""

from __future__ import annotations

from ..schedule import GENERATORS, ScheduleSpec

MOST = 11_000_000  # of a search, about 11 s of one core

_CASE, _ROUGH, _ROUGH_STAGE, _LIKELY = 400, 500, 35, 1_500
_LIKELY_PASS = 2
# Of a pass of an order that is fixed, or made for its costs without a search; the latter with
# passes of a vocabulary, for which several orders are made.
_FIXED, _LISTED, _SHARDED = 4, 20, 36
# Of a pass of an order that is searched for, beside these; and with passes of a vocabulary.
_SEARCHED, _SEARCHED_SHARDED = 35, 110
_VEE = 1_500_000  # of a V order's search, whatever its size
_CAPS = 6  # orders are made for one at a cap
_CAP = 14_000_000
_JOINED = 160  # of a pass, to try joint ones
_OFFLOAD, _OFFLOAD_AUTO = 100, 250  # of a pass

# Of the work, what is kept for what comes later.
FOR_COSTLY, FOR_SMALL, FOR_LAST = 0.3, 0.15, 0.05
NEAR = 1.03  # likely bytes were up to 3 % too many, seldom


class Work:
    """What is left of a search's work.

    Args:
        left: to begin with.
    """

    def __init__(self, left: float) -> None:
        self.most = self.left = left

    def more_than(self, share: float) -> bool:
        """True if more than this share of it is left."""
        return self.left > share * self.most

    def affords(self, spec: ScheduleSpec, share: float) -> bool:
        """True if this share of the whole is left after ``of_point``."""
        return self.left - self.of_point(spec) > share * self.most

    def take(self, work: float) -> None:
        """So much was done."""
        self.left -= work

    def make(self, spec: ScheduleSpec) -> None:
        """A schedule was made."""
        self.left -= self.of_point(spec)

    def of_cases(self, number: int) -> float:
        """Closed forms."""
        return _CASE * number

    def of_rough(self, spec: ScheduleSpec) -> float:
        """A candidate's rough time."""
        return _ROUGH + _ROUGH_STAGE * spec.placement.num_stages

    def of_likely(self, spec: ScheduleSpec) -> float:
        """A candidate's likely time."""
        few = min(spec.microbatches, 2 * spec.pp)
        return _LIKELY + _LIKELY_PASS * 3 * spec.placement.num_stages * few

    def of_point(self, spec: ScheduleSpec) -> float:
        """A schedule, made and simulated."""
        units = sum(spec.slices) or spec.microbatches
        passes = 3 * spec.placement.num_stages * units
        made = GENERATORS[spec.name]
        each: float = _FIXED if made.fixed else _LISTED
        more = 0.0
        if spec.barriers:
            each = _SHARDED
        if spec.effort and not made.fixed:
            each += _SEARCHED_SHARDED if spec.barriers else _SEARCHED
            more = _VEE * spec.effort if made.placement == "vee" and not spec.barriers else 0.0
        if spec.overlap:
            each += _JOINED
        if spec.cap is not None:
            each, more = _CAPS * each, more + _CAP * spec.effort
        if spec.offload is not None:
            each += _OFFLOAD_AUTO if spec.offload.wanted == "auto" else _OFFLOAD
        return each * passes + more


def full() -> float:
    """The effort of training's own orders."""
    return ScheduleSpec("1f1b", 2, 1).effort
