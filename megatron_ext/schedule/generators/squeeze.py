"""Squeezing: remove idle time from an order and reorder it under a memory cap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ..actions import Action, Op
from ..costs import Durations
from ..placement import Placement
from ..simulate import inputs, outputs, peak_sets

Orders = list[list[Action]]  # compute actions of every rank
SETS = {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}  # change of the resident activation sets


def unit_durations(placement: Placement) -> Durations:
    """F, B and W of every stage take 1, a hop 0."""
    ones = (1,) * placement.num_stages
    return Durations(ones, ones, ones, 0, 1)


def duration(durations: Durations, op: Op, stage: int) -> int:
    """Integer duration of one compute action."""
    if op is Op.F:
        return durations.forward[stage]
    if op is Op.W:
        return durations.backward_weight[stage]
    b = durations.backward_input[stage]
    return b if op is Op.B else b + durations.backward_weight[stage]


def squeeze(
    orders: Orders,
    placement: Placement,
    cap: int | Sequence[int],
    durations: Durations | None = None,
    patience: Fraction | int = 1,
) -> Orders:
    """Remove idle time and reorder under a memory cap (CM, section 3.1 and appendix C, in one).

    List scheduling: whenever a rank is free it runs the first pass, in the given order, whose
    inputs are there. A pass may so overtake others that still wait, which fills the idle time of
    warm-up and cool-down; the steady state, where nothing waits, keeps its order. An F may
    overtake only if the rank's remaining passes, in the given order, then still fit under the
    cap. That makes it safe: the earliest remaining pass of the given order can always run next.
    When a rank has no F left, B goes before W, since only B feeds other ranks.

    Args:
        orders: every rank's passes in an executable order, each (op, stage) by microbatch.
        placement: where the stages lie.
        cap: most activation sets resident on a rank, counted from F's start to W's (BW's) end;
            one number, or one a rank.
        durations: of the passes, and of a hop; default 1 each and no hop.
        patience: a pass may overtake if those before it, as far as is known, stay away for
            this share of its duration. 1 never delays what comes first, 0 never waits. At equal
            durations without a hop both mean the same.

    Returns:
        New orders; no rank ever holds more than its cap.

    Raises:
        ValueError: the given orders need more than the cap.
    """
    caps = [cap] * placement.pp if isinstance(cap, int) else list(cap)
    for need, most in zip(peak_sets(orders), caps):
        if need > most:
            raise ValueError(
                f"this order keeps {need} activation sets, more than the cap of {most}"
            )
    work = unit_durations(placement) if durations is None else durations
    patience = Fraction(patience)
    ends: dict[tuple[int, int], list[int]] = {}
    fused = {a.stage for row in orders for a in row if a.op is Op.BW}
    ranks = [_Rank(order, placement, rank, work, fused, ends) for rank, order in enumerate(orders)]
    num, den = patience.numerator, patience.denominator
    wakes = [(0, rank) for rank in range(placement.pp)]
    known = set(wakes)
    while wakes:
        now = wakes[0]
        heapq.heappop(wakes)
        known.discard(now)
        time, at = now
        rank = ranks[at]
        if time < rank.clock or rank.head == len(rank.queue):
            continue
        index, again = rank.choose(time, caps[at], num, den)
        news = [(again, at)] if again is not None else []
        if index is not None:
            news = rank.run(index, time)
        for wake in news:
            if wake not in known:
                known.add(wake)
                heapq.heappush(wakes, wake)
    return [rank.done for rank in ranks]


@dataclass
class _Lane:
    """The passes of one op and stage; they run in microbatch order."""

    sets: int
    duration: int
    # What this lane's passes wait for: end times by microbatch, hop, and the producer's duration.
    after: list[tuple[list[int], int, int]]
    ends: list[list[int]]  # where the end times of this lane's passes go
    feeds: list[tuple[int, int]]  # (rank, hop) of those that wait for them


@dataclass
class _Rank:
    order: Sequence[Action]
    placement: Placement
    rank: int
    durations: Durations
    fused: set[int]
    all_ends: dict[tuple[int, int], list[int]]
    done: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = sorted({(a.op, a.stage) for a in self.order})
        self.lanes = [self._lane(op, stage) for op, stage in names]
        number = {name: i for i, name in enumerate(names)}
        self.queue = [(number[a.op, a.stage], a.microbatch) for a in self.order]
        self.taken = bytearray(len(self.queue))
        self.head = self.clock = self.sets = 0
        self.forwards = sum(a.op is Op.F for a in self.order)
        self.growing = {i for i, lane in enumerate(self.lanes) if lane.sets > 0}
        self.only_w = {i for i, (op, _) in enumerate(names) if op is Op.W}

    def _lane(self, op: Op, stage: int) -> _Lane:
        work, last = self.durations, self.placement.num_stages - 1

        def ends(kind: int, other: int) -> list[int]:
            return self.all_ends.setdefault((kind, other), [])

        def hop(other: int) -> int:
            return work.hop if self.placement.rank_of(other) != self.rank else 0

        def producer(kind: int, other: int) -> int:
            return duration(work, (Op.F, Op.BW if other in self.fused else Op.B)[kind], other)

        # Both the next stage's F and the previous stage's B are fed; nothing waits for a W.
        fed = {Op.F: stage + 1, Op.W: stage}.get(op, stage - 1)
        feeds = [(self.placement.rank_of(fed), hop(fed))] if 0 <= fed <= last else []
        return _Lane(
            SETS[op],
            duration(work, op, stage),
            [
                (ends(kind, other), hop(other), producer(kind, other))
                for kind, other in inputs(op, stage, last + 1)
            ],
            [ends(kind, stage) for kind in outputs(op)],
            feeds,
        )

    def choose(self, time: int, cap: int, num: int, den: int) -> tuple[int | None, int | None]:
        """(index into the queue of the pass to start at ``time``, or None: stay idle; when to
        look again if something could run but gives way)."""
        sets = peak = self.sets  # resident now, and the most up to this place of the queue
        blocked: set[int] = set()
        spare: int | None = None
        soonest: int | None = None  # when a pass that comes first may be able to run
        gave_way = False
        for index in range(self.head, len(self.queue)):
            if self.taken[index]:
                continue
            number, microbatch = self.queue[index]
            lane = self.lanes[number]
            if number not in blocked:
                ready = 0
                for ends, hop, took in lane.after:
                    end = ends[microbatch] if len(ends) > microbatch else time + took
                    if end + hop > ready:
                        ready = end + hop
                if ready <= time:
                    if soonest is not None and (soonest - time) * den < lane.duration * num:
                        gave_way = True
                    elif self.forwards or number not in self.only_w:
                        return index, None
                    elif spare is None:
                        spare = index
                elif soonest is None or ready < soonest:
                    soonest = ready
                # What cannot run now blocks the later microbatches of its lane.
                blocked.add(number)
            sets += lane.sets
            if sets > peak:
                peak = sets
            if peak >= cap:
                blocked |= self.growing
            if len(blocked) == len(self.lanes):
                break
        if spare is not None and soonest is not None:
            # Found before some B that is still away; the same rule holds for it.
            number, _ = self.queue[spare]
            if (soonest - time) * den < self.lanes[number].duration * num:
                return None, soonest
        return spare, soonest if gave_way else None

    def run(self, index: int, time: int) -> list[tuple[int, int]]:
        """Start the chosen pass at ``time``; returns who has reason to look when."""
        number, _ = self.queue[index]
        lane = self.lanes[number]
        self.clock = time + lane.duration
        for ends in lane.ends:
            ends.append(self.clock)
        self.taken[index] = 1
        self.sets += lane.sets
        self.forwards -= lane.sets > 0
        self.done.append(self.order[index])
        while self.head < len(self.queue) and self.taken[self.head]:
            self.head += 1
        wakes = [(self.clock, self.rank)]
        wakes += [(self.clock + hop, rank) for rank, hop in lane.feeds if rank != self.rank]
        return wakes
