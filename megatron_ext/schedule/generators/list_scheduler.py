"""List scheduler: remove idle time from an order and reorder it under a memory cap.

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, below CM) calls it squeezing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..actions import Action, Op, Operation, RankActions
from ..costs import Durations
from ..effects import DEVICE, KINDS, inputs, peak_sets, results
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
    ranks = [
        _Rank.of(order, most, wait, urgent, lane_of)
        for order, most, wait in zip(orders, caps, _waits(min_gap, placement.pp))
    ]
    pp, before = placement.pp, -1
    wakes = list(range(pp))  # a heap of time * pp + rank
    while wakes:
        wake = heapq.heappop(wakes)
        if wake == before:
            continue
        before = wake
        time, at = divmod(wake, pp)
        rank = ranks[at]
        if time < rank.clock or rank.following[-1] == len(rank.queue):
            continue
        index = rank.choose(time)
        # A rank that finds nothing, or gives way to a pass that is expected, looks again when it is
        # fed: until then that pass comes ever nearer, or stays as far away as its producer takes.
        if index is not None:
            lane = rank.run(index, time)
            clock = rank.clock
            heapq.heappush(wakes, clock * pp + at)
            if lane.feeds is not None:
                fed, hop = lane.feeds
                # One that is busy until then looks again anyway.
                if ranks[fed].clock < clock + hop:
                    heapq.heappush(wakes, (clock + hop) * pp + fed)
            if lane.joins and any(joined.update() for joined in lane.joins):
                for other in range(pp):
                    heapq.heappush(wakes, (clock + lane_of.latency) * pp + other)
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


class _Lane(NamedTuple):
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


class _Lanes:
    """Makes the lanes of all ranks.

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

    def __call__(self, op: Operation, stage: int) -> _Lane:
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
        return _Lane(
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
    """One rank's passes: a ring of those that have not run yet, in the given order.

    Args:
        queue: the lane of every pass.
        lanes: of the rank.
        cap: most activation sets.
        waits: least gaps, as numerator and denominator.
        urgent: lanes that go before all others.

    Attributes:
        done: positions in the given order, in the new one.
    """

    def __init__(
        self,
        queue: list[int],
        lanes: Sequence[_Lane],
        cap: int,
        waits: _Waits,
        urgent: Sequence[int] = (),
    ) -> None:
        self.queue, self.lanes, self.limits = queue, lanes, (cap, waits)
        size = len(queue)
        # Entry ``size``, also reached as -1, is the ring's joint: before the first, after the last.
        self.following: list[int] = [*range(1, size + 1), 0]
        self.previous = [size, *range(size)]
        self.count = [0] * len(lanes)  # passes of each lane that have run
        total = Counter(queue)
        self.gates = [(*(lane.gate or (None, 0)), total[i]) for i, lane in enumerate(lanes)]
        self.urgent = [(i, [at for at, n in enumerate(queue) if n == i]) for i in urgent]
        self.clock = self.sets = 0
        self.forwards = sum(lanes[number].grows for number in queue)
        self.done: list[int] = []

    @classmethod
    def of(
        cls,
        order: Sequence[Action],
        cap: int,
        waits: _Waits,
        urgent: Collection[Operation],
        lane_of: _Lanes,
    ) -> _Rank:
        """The rank with this order."""
        names = sorted({(a[0], a[1]) for a in order})
        number = {name: i for i, name in enumerate(names)}
        queue = [number[op, stage] for op, stage, _ in order]
        first = [number[op, stage] for op, stage in names if op in urgent]
        return cls(queue, [lane_of(op, stage) for op, stage in names], cap, waits, first)

    def choose(self, time: int) -> int | None:
        """Index of the pass to start at ``time``, or None: stay idle."""
        for number, places in self.urgent:
            microbatch, gate = self.count[number], self.lanes[number].gate
            if microbatch < len(places) and gate is not None:
                ends, latency = gate
                if len(ends) > microbatch and ends[microbatch] + latency <= time:
                    return places[microbatch]
        head = self.following[-1]
        number = self.queue[head]
        lane = self.lanes[number]
        # Nearly always the first pass can run.
        if self.forwards or not lane.only_w:
            if lane.gate is None:
                return head
            ends, hop = lane.gate
            microbatch = self.count[number]
            if len(ends) > microbatch and ends[microbatch] + hop <= time:
                return head
        return self._overtaker(time, head)

    def _overtaker(self, time: int, index: int) -> int | None:
        queue, lanes, following, count = self.queue, self.lanes, self.following, self.count
        ready_lanes = self._ready_lanes(time)
        if not ready_lanes:
            return None
        size, (cap, waits) = len(queue), self.limits
        num, den = waits[self.forwards == 0]
        sets = peak = self.sets  # resident now, and the most up to this place of the queue
        blocked = [False] * len(lanes)
        free = len(lanes)
        spare: int | None = None
        soonest: int | None = None  # when a pass that comes first may be able to run
        full = False
        while index != size and free:
            number = queue[index]
            lane = lanes[number]
            if not blocked[number]:
                ready, microbatch = 0, count[number]
                for ends, hop, took in lane.after:
                    end = ends[microbatch] if len(ends) > microbatch else time + took
                    if end + hop > ready:
                        ready = end + hop
                if ready <= time:
                    ready_lanes -= 1
                    gives_way = soonest is not None and (soonest - time) * den < lane.duration * num
                    if not gives_way and (self.forwards or not lane.only_w):
                        return index
                    if not gives_way and spare is None:
                        spare = index
                elif soonest is None or ready < soonest:
                    soonest = ready
                # What cannot run now blocks the later microbatches of its lane.
                blocked[number] = True
                free -= 1
                if not ready_lanes and spare is None:
                    return None
            sets += lane.sets
            if sets > peak:
                peak = sets
            if peak >= cap and not full:
                full = True
                for number, lane in enumerate(lanes):
                    if lane.grows and not blocked[number]:
                        blocked[number] = True
                        free -= 1
            index = following[index]
        # A spare was found before some B that is still away; the same rule holds for it.
        if (
            spare is not None
            and soonest is not None
            and (soonest - time) * den < lanes[queue[spare]].duration * num
        ):
            return None
        return spare

    def _ready_lanes(self, time: int) -> int:
        """Number of lanes whose next pass has its inputs."""
        found = 0
        for (ends, hop, total), microbatch in zip(self.gates, self.count):
            if ends is None:
                found += microbatch < total
            elif len(ends) > microbatch and ends[microbatch] + hop <= time:
                found += 1
        return found

    def run(self, index: int, time: int) -> _Lane:
        """Start the chosen pass at ``time``; returns its lane."""
        number = self.queue[index]
        lane = self.lanes[number]
        self.clock = clock = time + lane.duration
        for ends in lane.ends:
            ends.append(clock)
        self.count[number] += 1
        before, after = self.previous[index], self.following[index]
        self.following[before] = after
        self.previous[after] = before
        self.sets += lane.sets
        if lane.grows:
            self.forwards -= 1
        self.done.append(index)
        return lane
