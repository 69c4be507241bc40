"""Building blocks: a schedule is one microbatch's passes, stamped, squeezed and reordered.

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, below CM), sections 2 to 4.
Times here are chunk units: every F, B and W of one chunk takes 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..actions import Action, Op
from ..placement import Placement
from ..simulate import inputs, outputs, peak_sets
from .plain import Orders

_SETS = {Op.F: 1, Op.B: 0, Op.W: -1, Op.BW: -1}  # change of the resident activation sets


@dataclass(frozen=True)
class Block:
    """The passes of one microbatch; microbatch j runs ``interval * j`` later.

    Attributes:
        placement: where the stages lie.
        interval: time between two microbatches; the passes of one rank fill it completely when
            it is 3 per chunk.
        offsets: (op, stage) -> start of that pass for microbatch 0.
    """

    placement: Placement
    interval: int
    offsets: dict[tuple[Op, int], int]

    def stamp(self, microbatches: int) -> Orders:
        """Every rank's passes of all microbatches in the order of the repeated block.

        The order can be executed: the block's own offsets respect the dependencies.
        """
        ranks: Orders = []
        for row in self.placement.stages:
            passes = [(at, op, s) for (op, s), at in self.offsets.items() if s in row]
            stamped = sorted(
                (at + self.interval * j, op, s, j)
                for at, op, s in passes
                for j in range(microbatches)
            )
            ranks.append([Action(op, s, j) for _, op, s, j in stamped])
        return ranks


def vee_block(pp: int, down: int, up: int, f_turn: int, loss_turn: int, b_turn: int) -> Block:
    """A block on the V placement (CM, section 4): F of both chunks, then B of both, then W.

    The peak is about (down + up)/6 of 1F1B's (CM, section 4.2), because the lifespans of the two
    chunks of a rank sum to the same number on every rank.

    Args:
        pp: pipeline ranks.
        down: time from one rank to the next where the passes go towards the last rank
            (F of chunk 0, B of chunk 1; CM's equation 2 wants them equal).
        up: the same on the way back (F of chunk 1, B of chunk 0).
        f_turn, b_turn: time from the first to the second of the two passes on the last rank.
        loss_turn: time from the last F to the first B, on rank 0.

    Raises:
        ValueError: two passes of one rank fall on the same time modulo the interval, 6.
    """
    offsets: dict[tuple[Op, int], int] = {}
    last = pp - 1
    end_f = down * last + f_turn + up * last
    end_b = end_f + loss_turn + down * last + b_turn
    for rank in range(pp):
        first, second = rank, 2 * pp - 1 - rank
        f1, b1 = end_f - up * rank, end_f + loss_turn + down * rank
        b0 = end_b + up * (last - rank)
        free = sorted(set(range(6)) - {x % 6 for x in (down * rank, f1, b1, b0)})
        if len(free) != 2:
            raise ValueError(f"passes of rank {rank} collide: F and B at {down * rank, f1, b1, b0}")
        offsets |= {(Op.F, first): down * rank, (Op.F, second): f1}
        offsets |= {(Op.B, first): b0, (Op.B, second): b1}
        # W in the two residues left, so that the longer wait of the two is as short as possible.
        waits = [
            tuple((r - b - 1) % 6 for r, b in zip(pair, (b0, b1))) for pair in (free, free[::-1])
        ]
        w0, w1 = min(waits, key=lambda wait: (max(wait), sum(wait)))
        offsets |= {(Op.W, first): b0 + 1 + w0, (Op.W, second): b1 + 1 + w1}
    return Block(Placement.vee(pp), 6, offsets)


def squeeze(orders: Orders, placement: Placement, cap: int) -> Orders:
    """Remove idle time and reorder under a memory cap (CM, section 3.1 and appendix C, in one).

    List scheduling at unit times: whenever a rank is free it runs the first pass, in the given
    order, whose inputs are there. A pass may so overtake others that still wait, which fills the
    idle time of warm-up and cool-down; the steady state, where nothing waits, keeps its order.
    An F may overtake only if the rank's remaining passes, in the given order, then still fit
    under the cap. That makes it safe: the earliest remaining pass of the given order can always
    run next. When a rank has no F left, B goes before W, since only B feeds other ranks.

    Args:
        orders: every rank's passes in an executable order, each (op, stage) by microbatch.
        placement: where the stages lie.
        cap: most activation sets resident on a rank, counted from F's start to W's (BW's) end.

    Returns:
        New orders; no rank ever holds more than ``cap`` sets.

    Raises:
        ValueError: the given orders need more than ``cap`` sets.
    """
    need = max(peak_sets(orders))
    if need > cap:
        raise ValueError(f"this order keeps {need} activation sets, more than the cap of {cap}")
    ends: dict[tuple[int, int], list[int]] = {}
    ranks = [_Rank(order, placement.num_stages, ends) for order in orders]
    time, left = 0, sum(len(order) for order in orders)
    while left:
        for rank in ranks:
            index = rank.choose(time, cap)
            if index is not None:
                rank.run(index, time)
                left -= 1
        time += 1
    return [rank.done for rank in ranks]


@dataclass
class _Lane:
    """The passes of one op and stage; they run in microbatch order."""

    sets: int
    after: list[list[int]]  # end times, by microbatch, of the passes this lane's passes wait for
    ends: list[list[int]]  # where the end times of this lane's passes go


@dataclass
class _Rank:
    order: Sequence[Action]
    num_stages: int
    all_ends: dict[tuple[int, int], list[int]]
    done: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        def ends(kind: int, stage: int) -> list[int]:
            return self.all_ends.setdefault((kind, stage), [])

        names = sorted({(a.op, a.stage) for a in self.order})
        self.lanes = [
            _Lane(
                _SETS[op],
                [ends(kind, other) for kind, other in inputs(op, stage, self.num_stages)],
                [ends(kind, stage) for kind in outputs(op)],
            )
            for op, stage in names
        ]
        number = {name: i for i, name in enumerate(names)}
        self.queue = [(number[a.op, a.stage], a.microbatch) for a in self.order]
        self.taken = bytearray(len(self.queue))
        self.head = 0
        self.sets = 0
        self.forwards = sum(a.op is Op.F for a in self.order)
        self.growing = {i for i, lane in enumerate(self.lanes) if lane.sets > 0}
        self.only_w = {i for i, (op, _) in enumerate(names) if op is Op.W}

    def choose(self, time: int, cap: int) -> int | None:
        """Index into the queue of the pass to start at ``time``; None: stay idle."""
        sets = peak = self.sets  # resident now, and the most up to this place of the queue
        blocked: set[int] = set()
        spare: int | None = None
        for index in range(self.head, len(self.queue)):
            if self.taken[index]:
                continue
            number, microbatch = self.queue[index]
            lane = self.lanes[number]
            if number not in blocked:
                if all(len(e) > microbatch and e[microbatch] <= time for e in lane.after):
                    if self.forwards or number not in self.only_w:
                        return index
                    spare = index if spare is None else spare
                # What cannot run now blocks the later microbatches of its lane.
                blocked.add(number)
            sets += lane.sets
            if sets > peak:
                peak = sets
            if peak >= cap:
                blocked |= self.growing
            if len(blocked) == len(self.lanes):
                break
        return spare

    def run(self, index: int, time: int) -> None:
        """Start the chosen pass at ``time``; it takes one unit."""
        number, _ = self.queue[index]
        lane = self.lanes[number]
        for ends in lane.ends:
            ends.append(time + 1)
        self.taken[index] = 1
        self.sets += lane.sets
        self.forwards -= lane.sets > 0
        self.done.append(self.order[index])
        while self.head < len(self.queue) and self.taken[self.head]:
            self.head += 1
