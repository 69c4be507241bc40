"""Joint passes in any named schedule: one rank's F and B of different microbatches in one another,
so that the communication between experts of each is hidden behind the computation of the other.

A pair takes longer than either of its passes, and a microbatch's way takes a whole pair at every
hop. So sets live longer: with all passes in pairs a rank of the V placement holds about 2p of them,
with every other pass in a pair about half as many. Orders are made for the memory that there is, in
three ways: with the F's and B's of a given order, by periodic patterns of the V placement in which
two microbatches travel along the ranks together, and by ranks that take what comes.

All ranks of an expert-parallel group run the same list, so their all-to-alls meet in one order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product, zip_longest
from typing import Any, NamedTuple

from ..actions import Action, AnyAction, Op
from ..costs import Durations
from ..effects import passes, peak_sets
from ..schedule import Schedule, ScheduleError
from ..simulate import run_times
from ..tasks import Tasks
from .dualpipev import dualpipev
from .pairing import NEVER, Greedy, Item, Listed, Machine, Policy, Rule

_SHORT = 3  # times p: microbatches that all ways are tried with
_KEPT = 2  # ways of each kind that are tried with all microbatches
_WORK = 800_000  # passes that a search places, about
_LEAST = 40  # orders that any search makes
_SHARES = (Fraction(1), Fraction(1, 2), Fraction(0))
_CHOICES: dict[str, tuple[Any, ...]] = {
    "late_f": (True, False),
    "late_b": (True, False),
    "wait_f": (*_SHARES, Fraction(2), Fraction(4)),
    "wait_b": (*_SHARES, Fraction(2)),
    "spare": (1, 2, 3, 4, 6),
    "reserve": (0, 1),
    "ahead": tuple(Fraction(x, 6) for x in range(5)),
    "whole": (True, False),
    "room": (True, False),
    "gap": (*_SHARES, Fraction(1, 4)),
}
# Of rules that take what comes: sets kept free, gap, room.
_STARTS = (
    *((0, Fraction(1), False), (0, Fraction(0), False)),
    *((0, Fraction(1, 2), True), (1, Fraction(1, 2), True)),
)
_DRAWN = 60  # changes that are tried before a search ends


def add_pairs(schedule: Schedule, most_sets: int | None = None) -> Schedule:
    """``schedule`` with joint passes, if that is faster under its costs; never slower.

    Args:
        schedule: compute actions. Its costs have the communication (``Costs.exchange``), without
            which pairs gain nothing.
        most_sets: on any rank; default one more than ``schedule`` itself holds, because a pair's F
            takes memory before its B frees any.

    Raises:
        ScheduleError: offload actions, or those of a sharded vocabulary.
    """
    schedule.require_whole("an order with passes in pairs")
    if schedule.has_offload or schedule.vocabulary is not None:
        raise ScheduleError(
            f"{schedule.name} has offload actions or passes of a sharded vocabulary, which run "
            "between passes that pairs would join; leave them out"
        )
    durations = schedule.costs.durations(schedule.placement).reduced()
    if schedule.has_pairs or not any(durations.exchange_forward):
        return schedule
    cap = max(peak_sets(schedule.ranks)) + 1 if most_sets is None else most_sets
    ranks = _Search(schedule, durations, cap).best()
    if ranks is not None:
        schedule = schedule.with_ranks(ranks)
    pairs = sum(len(action.parts) > 1 for row in schedule.ranks for action in row)
    share = pairs / (schedule.microbatches * schedule.placement.num_stages)
    # A faster order may have none: ranks that take what comes can be faster by that alone.
    said = f"{share:.0%} of passes in pairs" if pairs else "passes in pairs would not be faster"
    return replace(schedule, note=_and(schedule.note, said))


def _and(*notes: str) -> str:
    return "; ".join(filter(None, notes))


class _Taking(NamedTuple):
    """Ranks take what comes (``Greedy``)."""

    policies: tuple[Policy, ...]
    gap: Fraction
    fused: bool

    def rule(self, search: _Search, m: int) -> Rule:
        return Greedy(self.policies)

    def others(self, dice: random.Random) -> Iterator[_Taking]:
        """One number of all ranks, of one half of them or of the first one changed."""
        p = len(self.policies)
        changes = [(n, x) for n, values in _CHOICES.items() for x in values]
        changes = [(n, x) for n, x in changes if not (self.fused and n in ("whole", "gap"))]
        ranges = ((0, p), (0, p), (0, p // 2), (p // 2, p), (0, 1))
        for _ in range(_DRAWN):
            name, value = dice.choice(changes)
            if name == "gap":
                yield self._replace(gap=value)
                continue
            low, high = dice.choice(ranges)
            policies = [
                one._replace(**{name: value}) if low <= i < high else one
                for i, one in enumerate(self.policies)
            ]
            if all(one.spare > one.reserve for one in policies):
                yield self._replace(policies=tuple(policies))


class _Shifted(NamedTuple):
    """The F's and the backward passes of the given order, side by side from some F on: ``more``
    F's later than there, and ``slope`` for each rank behind."""

    slope: int
    more: int
    gap: Fraction
    patience: Fraction | None
    fused: bool

    def rule(self, search: _Search, m: int) -> Rule:
        items = []
        for rank, row in enumerate(search.given.ranks):
            own = [a for a in passes(row) if a.microbatch < m and a.op is not Op.W]
            forward = [a for a in own if a.op is Op.F]
            op = Op.BW if self.fused else Op.B
            backward = [a._replace(op=op) for a in own if a.op is not Op.F]
            first = next(i for i, a in enumerate(own) if a.op is not Op.F)
            lead = first + self.more + self.slope * (search.given.pp - 1 - rank)
            missing: list[Action | None] = [None] * min(lead, len(forward))
            both = zip_longest(forward, [*missing, *backward])
            items.append([Item(*one) for one in both])
        return Listed(items, self.patience)

    def others(self, dice: random.Random) -> Iterator[_Shifted]:
        for gap in _SHARES:
            yield self._replace(gap=gap)
        for patience in (None, *_SHARES):
            yield self._replace(patience=patience)


class _Travelling(NamedTuple):
    """A periodic pattern of the V placement. Chunk 0's F and chunk 1's B both travel to higher
    ranks and can stay together all the way, and so can chunk 1's F and chunk 0's B on their way
    back.

    Attributes:
        period: from one microbatch to the next.
        down, up: from one rank to the next on these two ways.
        turn: on the last rank, from chunk 0's F to chunk 1's.
        together: the ways on which passes are pairs, of "d" and "u".
        gap, patience, fused: as elsewhere.
    """

    period: int
    down: int
    up: int
    turn: int
    together: str
    gap: Fraction
    patience: Fraction | None
    fused: bool

    def rule(self, search: _Search, m: int) -> Rule:
        p = search.given.pp
        pair, f, b = search.longest(self.fused)
        op = Op.BW if self.fused else Op.B
        way = (p - 1) * self.down, (p - 1) * self.up
        # When chunk 0's F is on rank 0, chunk 1's F on the last rank, chunk 1's B on rank 0, and
        # chunk 0's B on the last rank. Passes of a pair are whole periods apart.
        first, second = 0, way[0] + self.turn
        third = second + way[1] + (pair if "u" in self.together else f)
        if "d" in self.together:
            third = _later(third, self.period)
        fourth = third + way[0] + (pair if "d" in self.together else b)
        if "u" in self.together:
            fourth = second + _later(fourth - second, self.period)
        items = []
        for rank in range(p):
            low, high, behind = rank, 2 * p - 1 - rank, p - 1 - rank
            starts = (
                ("d", first + rank * self.down, Op.F, low),
                ("u", second + behind * self.up, Op.F, high),
                ("d", third + rank * self.down, op, high),
                ("u", fourth + behind * self.up, op, low),
            )
            items.append(self._row(starts, m))
        return Listed(items, self.patience)

    def _row(self, starts: Sequence[tuple[str, int, Op, int]], m: int) -> list[Item]:
        """One rank's passes by their times, those of a pair at one place."""
        places: dict[tuple[int, str, int], list[Action | None]] = {}
        for way, start, op, stage in starts:
            backward = op is not Op.F
            # What is no pair has a place of its own.
            place = (0, way) if way in self.together else (1 + backward, way)
            for j in range(m):
                key = (start + j * self.period, place[1], place[0])
                places.setdefault(key, [None, None])[backward] = Action(op, stage, j)
        return [Item(*places[key]) for key in sorted(places)]

    def others(self, dice: random.Random) -> Iterator[_Travelling]:
        step = max(1, self.period // 24)
        for name in ("period", "down", "up", "turn"):
            for change in (-2 * step, -step, step, 2 * step):
                value = getattr(self, name) + change
                if value > 0:
                    yield self._replace(**{name: value})
        for gap in _SHARES:
            yield self._replace(gap=gap)
        for patience in (None, *_SHARES):
            yield self._replace(patience=patience)


def _makes_room(way: _Way) -> bool:
    return isinstance(way, _Taking) and way.policies[0].room


def _later(time: int, period: int) -> int:
    """The first whole period from ``time`` on."""
    return -(-time // period) * period


_Way = _Taking | _Shifted | _Travelling


class _Search:
    """The fastest lists that the three ways come to.

    Args:
        given: the schedule without pairs.
        durations: of its passes.
        cap: most activation sets on a rank.
    """

    def __init__(self, given: Schedule, durations: Durations, cap: int) -> None:
        self.given, self._durations, self._cap = given, durations, cap
        self._short = min(given.microbatches, _SHORT * given.pp)
        self._times: dict[_Way, int] = {}
        self._tasks: dict[int, Tasks] = {}  # by microbatches
        placed = 3 * self._short * given.placement.num_stages
        self._left = max(_LEAST, _WORK // placed)  # orders that may be made

    def best(self) -> list[list[AnyAction]] | None:
        """Every rank's passes; None if nothing is faster than the schedule itself."""
        ways = list(self._ways())
        # Evenly over all of them, where there is no time for each.
        stride = -(-2 * len(ways) // self._left) if 2 * len(ways) > self._left else 1
        for way in ways[::stride]:
            self._time(way)
        found: list[_Way] = []
        for kind in (_Shifted, _Travelling, _Taking):  # of equal orders the simplest
            tried = sorted(
                (way for way in self._times if isinstance(way, kind)), key=self._times.__getitem__
            )
            # A search from one of these two seldom finds the best of the other.
            apart = [[way for way in tried if _makes_room(way) is room] for room in (False, True)]
            for some in apart:
                if some:
                    self._climb(some[0])
            tried = [way for way in self._times if isinstance(way, kind)]
            found += sorted(tried, key=self._times.__getitem__)[:_KEPT]
        _, ends = run_times(self.given, self._durations)
        least, ranks = max(row[-1] for row in ends if row), None
        for way in found:
            made = self._made(way, self.given.microbatches)
            if made is not None and made.makespan < least:
                least, ranks = made.makespan, made.ranks
        return self._published(least) or ranks

    def _published(self, least: int) -> list[list[AnyAction]] | None:
        """DualPipeV's order, where it fits and is faster."""
        given = self.given
        if not given.placement.is_vee():
            return None
        ranks = dualpipev(given.pp, given.microbatches)
        if max(peak_sets(ranks)) > self._cap:
            return None
        _, ends = run_times(given.with_ranks(ranks), self._durations)
        return ranks if max(row[-1] for row in ends) < least else None

    def longest(self, fused: bool) -> tuple[int, int, int]:
        """Of all stages: a pair, an F, and a backward pass."""
        d, n = self._durations, self.given.placement.num_stages
        op = Op.BW if fused else Op.B
        pairs = (d.joint([(Op.F, s), (op, n - 1 - s)]) for s in range(n))
        return max(pairs), max(d.forward), max(d.of(op, s) for s in range(n))

    def _climb(self, way: _Way) -> None:
        """Change one number after the other for as long as that helps."""
        better, dice = True, random.Random(0)
        while better:
            better = False
            for other in way.others(dice):
                if self._left <= 0:
                    return
                if other not in self._times and self._time(other) < self._times[way]:
                    way, better = other, True
                    break

    def _time(self, way: _Way) -> int:
        self._left -= 1
        made = self._made(way, self._short)
        self._times[way] = NEVER if made is None else made.makespan
        return self._times[way]

    def _made(self, way: _Way, m: int) -> Machine | None:
        """The run of one way; None if it comes to no order."""
        if m not in self._tasks:
            self._tasks[m] = Tasks(self.given.placement, self._durations, m)
        machine = Machine(self._tasks[m], self._durations, self._cap, way.fused, way.gap)
        return machine if machine.run(way.rule(self, m)) else None

    def _ways(self) -> Iterator[_Way]:
        one, half, none = _SHARES
        for fused in self._fused():
            if self.given.placement.is_vee():
                yield from self._patterns(fused)
            for slope, more, patience in product((0, 1, 2), (0, 1), (None, one)):
                yield _Shifted(slope, more, one, patience, fused)
            for late in product((True, False), (True, False)):
                for f, b in product((half, one, 2 * one), (none, one, 2 * one)):
                    for reserve, gap, room in _STARTS:
                        policy = Policy(*late, f, b, 1 + reserve, reserve, room=room)
                        yield _Taking((policy,) * self.given.pp, gap, fused)

    def _fused(self) -> list[bool]:
        """Whether backward passes may be BW: they must be where the schedule has no W, and W
        inside a pair hides communication where there is more of it than of other computation."""
        if not self.given.splits_backward:
            return [True]
        d = self._durations
        sent = sum(d.exchange_forward) + sum(d.exchange_backward)
        return [False, True] if 2 * sent > sum(d.forward) + sum(d.backward_input) else [False]

    def _patterns(self, fused: bool) -> Iterator[_Way]:
        pair, f, b = self.longest(fused)
        weights = 0 if fused else 2 * max(self._durations.backward_weight)
        single = max(f, b)
        for together, alone in (("du", 0), ("d", f + b), ("u", f + b)):
            period = len(together) * pair + alone + weights
            least = {way: pair if way in together else single for way in "du"}
            steps = [
                list(dict.fromkeys((least[way], period // 2, period - least[other])))
                for way, other in ("du", "ud")
            ]
            turns = dict.fromkeys((pair, f, *(period * i // 6 for i in range(2, 7))))
            for down, up, turn in product(*steps, turns):
                yield _Travelling(period, down, up, turn, together, _SHARES[0], None, fused)
