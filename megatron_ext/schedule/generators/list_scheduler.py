"""List scheduler: remove idle time from an order and reorder it under a memory cap.

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, below CM) calls it squeezing.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import compress

from ..actions import Op, Operation, RankActions
from ..costs import Durations
from ..effects import DEVICE, KINDS, inputs, peak, peak_sets, results
from ..placement import Placement
from ..vocabulary import KIND, Vocabulary, VocabularyOp

# Least gap that a pass may fill, as a share of its duration: while its rank has F's left, and after
# them.
MinGap = tuple[Fraction | int, Fraction | int]
_Waits = tuple[tuple[int, int], tuple[int, int]]


def list_schedule(
    orders: RankActions,
    placement: Placement,
    cap: int | Sequence[int],
    durations: Durations | None = None,
    min_gap: Fraction | int | Sequence[MinGap] = 1,
    vocabulary: Vocabulary | None = None,
    urgent: Collection[Operation] = (),
    *,
    backward: bool = False,
) -> RankActions:
    """Remove idle time and reorder under a memory cap (CM, section 3.1 and appendix C, in one).

    List scheduling: whenever a rank is free it runs the first pass, in the given order, whose
    inputs are there. A pass may so overtake others that still wait, which fills the idle time of
    warm-up and cool-down; the steady state, where nothing waits, keeps its order. An F may
    overtake only if the rank's remaining passes, in the given order, then still fit under the
    cap. That makes it safe: the earliest remaining pass of the given order can always run next.
    When a rank has no F left, B goes before W, since only B feeds other ranks.

    Args:
        orders: every rank's passes in an executable order, each (op, stage) by microbatch.
        placement: rank and chunk of every stage.
        cap: most activation sets resident on a rank, counted from F's start to W's (BW's) end;
            one number, or one a rank.
        durations: of the passes, and of a hop; default 1 each and no hop.
        min_gap: a pass may overtake if those before it, as far as is known, stay away for
            this share of its duration. 1 never delays what comes first, 0 never waits. At equal
            durations without a hop both mean the same. One number, or a pair a rank: for while it
            has F's left, and for after them.
        vocabulary: passes of a sharded one.
        urgent: operations that go before everything else once they can run.
        backward: from the end to the start: time runs backwards, a W takes memory and an F frees
            it. Idle time then comes early instead of late. Not with a vocabulary.

    Returns:
        New orders; no rank ever holds more than its cap.

    Raises:
        ValueError: the given orders need more than the cap.
    """
    caps = _kept([cap] * placement.pp if isinstance(cap, int) else cap, orders)
    work = Durations.unit(placement) if durations is None else durations
    if backward:
        orders = [row[::-1] for row in orders]
    lane_of = _Lanes(placement, work, orders, vocabulary, backward)
    ranks = []
    for order, most, wait in zip(orders, caps, _waits(min_gap, placement.pp)):
        queue = [lane_of[op, stage] for op, stage, _ in order]
        mine = sorted({a[:2] for a in order if a[0] in urgent}) if urgent else []
        ranks.append(_Rank(queue, most, wait, [lane_of[name] for name in mine]))
    pp, ahead = placement.pp, vocabulary is None
    wakes = list(range(pp))  # a heap of time * pp + rank
    while wakes:
        time, at = divmod(heapq.heappop(wakes), pp)
        rank = ranks[at]
        if time < rank.clock:
            continue
        # A rank that finds nothing, or gives way to a pass that is expected, looks again when it is
        # fed: until then that pass comes ever nearer, or stays as far away as its producer takes.
        lane = rank.choose(time)
        while lane is not None:
            time = rank.run(lane, time)
            if lane.feeds is not None:
                fed, hop = lane.feeds
                # One that is busy until then looks again anyway.
                if ranks[fed].clock < time + hop:
                    heapq.heappush(wakes, (time + hop) * pp + fed)
            if lane.joins and any(joined.update() for joined in lane.joins):
                for other in range(pp):
                    heapq.heappush(wakes, (time + lane_of.latency) * pp + other)
            # What comes first, with its inputs known, will be chosen whatever else happens.
            lane = rank.first(time) if ahead else None
            if lane is None:
                heapq.heappush(wakes, time * pp + at)
    step = -1 if backward else 1
    return [[order[i] for i in rank.done[::step]] for order, rank in zip(orders, ranks)]


def _kept(caps: Sequence[int], orders: RankActions) -> Sequence[int]:
    """``caps``, by rank; an error if ``orders`` need more."""
    for need, most in zip(peak_sets(orders), caps):
        if need > most:
            raise ValueError(
                f"this order keeps {need} activation sets, more than the cap of {most}"
            )
    return caps


def _waits(min_gap: Fraction | int | Sequence[MinGap], pp: int) -> list[_Waits]:
    pairs = min_gap if isinstance(min_gap, Sequence) else [(min_gap, min_gap)] * pp
    return [
        (Fraction(first).as_integer_ratio(), Fraction(last).as_integer_ratio())
        for first, last in pairs
    ]


@dataclass(slots=True)
class _Lane:
    """The passes of one op and stage; they run in microbatch order."""

    sets: int
    duration: int
    # What this lane's passes wait for: end times by microbatch, hop, and the producer's duration.
    after: list[tuple[list[int], int, int]]
    # The one of these that comes last, if everything earlier on the rank has run; with its hop.
    gate: tuple[list[int], int] | None
    ends: list[list[int]]  # where the end times of this lane's passes go
    feeds: tuple[int, int] | None  # (rank, hop) of the other rank that waits for them
    joins: list[_Joined]  # collectives that carry their results
    grows: bool
    only_w: bool
    places: list[int] = field(default_factory=list)  # in the rank's given order
    count: int = 0  # passes that have run


class _Joined(list[int]):
    """When all ranks' passes of one operation have ended, by microbatch."""

    def __init__(self, rows: Sequence[list[int]]) -> None:
        super().__init__()
        self._rows = rows

    def update(self) -> bool:
        """One of them has a new end; true if it was the last of its microbatch."""
        if not all(len(row) > len(self) for row in self._rows):
            return False
        self.append(max(row[len(self)] for row in self._rows))
        return True


class _Lanes(dict[tuple[Operation, int], _Lane]):
    """The lanes of all ranks, each made when it is first looked up.

    Args:
        orders: of all ranks.
    """

    def __init__(
        self,
        placement: Placement,
        work: Durations,
        orders: RankActions,
        vocabulary: Vocabulary | None,
        backward: bool,
    ) -> None:
        self._placement, self._work, self._vocabulary = placement, work, vocabulary
        self._backward = backward
        self.latency = work.collective
        self._fused = {a.stage for row in orders for a in row if a.op is Op.BW}
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._joined: dict[VocabularyOp, _Joined] = {}

    def _of(self, kind: int, stage: int) -> list[int]:
        return self._ends.setdefault((kind, stage), [])

    def __missing__(self, key: tuple[Operation, int]) -> _Lane:
        op, stage = key
        placement, work = self._placement, self._work
        rank_of, last = placement.rank_of, placement.num_stages - 1
        rank = rank_of(stage)

        def hop(other: int) -> int:
            return work.hop if rank_of(other) != rank else 0

        vocabulary, sets = self._vocabulary, DEVICE.get(op, 0)
        plain: Sequence[tuple[int, int]] = ()
        if self._backward:
            sets, plain = -sets, _outputs(op, stage, last)
        elif isinstance(op, Op):
            plain = inputs(op, stage, last + 1)
        after = [(self._of(k, other), hop(other), self._took(k, other)) for k, other in plain]
        joins: list[_Joined] = []
        if vocabulary is not None:
            collective = vocabulary.before(op, stage)
            if collective is not None:
                took = max(self._took(*part) for part in vocabulary.parts(collective))
                after.append((self._join(collective, vocabulary), work.collective, took))
            joins = [self._join(one, vocabulary) for one in vocabulary.behind(op, stage)]
        # Both the next stage's F and the previous stage's B are fed; nothing waits for a W.
        step = -1 if self._backward else 1
        fed = {Op.F: stage + step, Op.B: stage - step, Op.BW: stage - step}.get(op, -1)  # type: ignore[call-overload]
        feeds = None
        if 0 <= fed <= last and rank_of(fed) != rank:
            feeds = rank_of(fed), hop(fed)
        lane = self[key] = _Lane(
            sets,
            work.of(op, stage),
            after,
            after[-1][:2] if after else None,
            [self._of(kind, stage) for kind in _kinds(op)],
            feeds,
            joins,
            sets > 0,
            op is Op.W and not self._backward,
        )
        return lane

    def _took(self, kind: int, stage: int) -> int:
        """The duration of the pass with this result."""
        op = _OPS[kind]
        return self._work.of(Op.BW if op is Op.B and stage in self._fused else op, stage)

    def _join(self, collective: VocabularyOp, vocabulary: Vocabulary) -> _Joined:
        if collective not in self._joined:
            parts = vocabulary.parts(collective)
            self._joined[collective] = _Joined([self._of(*part) for part in parts])
        return self._joined[collective]


def _outputs(op: Operation, stage: int, last: int) -> list[tuple[int, int]]:
    """What a pass waits for with time running backwards: the passes that need its result."""
    f, b, w = 0, 1, 2
    if op is Op.F:
        return [(f, stage + 1) if stage < last else (b, stage)]
    own = [(w, stage)] if op is Op.B else []
    return own + [(b, stage - 1)] * (stage > 0) if op is not Op.W else []


def _kinds(op: Operation) -> tuple[int, ...]:
    return results(op) if isinstance(op, Op) else (KIND[op],)


_OPS: dict[int, Operation] = {**dict(enumerate(KINDS)), **{kind: op for op, kind in KIND.items()}}


class _Rank:
    """One rank's passes.

    Args:
        queue: the lane of every pass, in the given order.
        cap: most activation sets.
        waits: least gaps, as numerator and denominator.
        urgent: lanes that go before all others.

    Attributes:
        nexts: places in the given order, sorted, of every lane's next pass.
        done: places in the given order, in the new one.
    """

    def __init__(
        self, queue: list[_Lane], cap: int, waits: _Waits, urgent: Sequence[_Lane] = ()
    ) -> None:
        self.queue, self.cap, self.waits, self.urgent = queue, cap, waits, urgent
        self.nexts: list[int] = []
        for index, lane in enumerate(queue):
            if not lane.places:
                self.nexts.append(index)
            lane.places.append(index)
        self.steps = [lane.sets for lane in queue]
        self.left = bytearray(b"\1") * len(queue)
        self.clock = self.sets = 0
        self.forwards = self.steps.count(1)
        self.done: list[int] = []

    def choose(self, time: int) -> _Lane | None:
        """The lane whose next pass starts at ``time``, or None: stay idle."""
        for lane in self.urgent:
            if lane.count < len(lane.places) and lane.gate is not None:
                ends, hop = lane.gate
                if len(ends) > lane.count and ends[lane.count] + hop <= time:
                    return lane
        queue, forwards = self.queue, self.forwards
        num, den = self.waits[not forwards]
        spare: _Lane | None = None
        soonest: int | None = None  # when a pass that comes first may be able to run
        for index in self.nexts:
            lane = queue[index]
            ready, microbatch = 0, lane.count
            for ends, hop, took in lane.after:
                # What has not started yet takes its whole time from now on, as far as is known.
                end = time + took
                if len(ends) > microbatch and ends[microbatch] < end:
                    end = ends[microbatch]
                if end + hop > ready:
                    ready = end + hop
            if ready > time and (not num or (soonest is not None and ready >= soonest)):
                continue
            if lane.grows and not self._has_room(index):
                continue
            if ready > time:
                soonest = ready
            elif soonest is None or (soonest - time) * den >= lane.duration * num:
                if forwards or not lane.only_w:
                    return lane
                spare = spare or lane
        # A spare was found before some B that is still away; the same rule holds for it.
        if spare and soonest is not None and (soonest - time) * den < spare.duration * num:
            return None
        return spare

    def first(self, time: int) -> _Lane | None:
        """The lane of the first pass, if that can run at ``time`` and gives way to none."""
        if not self.nexts:
            return None
        lane = self.queue[self.nexts[0]]
        if lane.only_w and not self.forwards:
            return None
        if lane.gate is not None:
            ends, hop = lane.gate
            if len(ends) <= lane.count or ends[lane.count] + hop > time:
                return None
        return lane

    def _has_room(self, index: int) -> bool:
        """True if the passes before this place still fit after the F there."""
        head = self.nexts[0]
        if index == head:
            return True
        before = compress(self.steps[head:index], self.left[head:index])
        return peak(before, self.sets) < self.cap

    def run(self, lane: _Lane, time: int) -> int:
        """Start the lane's next pass at ``time``; returns its end."""
        self.clock = clock = time + lane.duration
        for ends in lane.ends:
            ends.append(clock)
        count, places = lane.count, lane.places
        index = places[count]
        self.left[index] = 0
        self.nexts.remove(index)
        lane.count = count = count + 1
        if count < len(places):
            insort(self.nexts, places[count])
        self.sets += lane.sets
        if lane.grows:
            self.forwards -= 1
        self.done.append(index)
        return clock
