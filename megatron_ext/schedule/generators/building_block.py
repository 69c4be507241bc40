"""Building blocks: the passes of one microbatch, repeated at a fixed interval.

"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, below CM), sections 2 to 4.
Times here are chunk units: every F, B and W of one chunk takes 1, a BW 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ..actions import Op, RankActions
from ..costs import Durations
from ..engine import Rows
from ..placement import Placement
from ..tasks import Tasks

INTERVAL = 6  # of a V block: F, B and W of two chunks


@dataclass(frozen=True)
class Block:
    """The passes of one microbatch, and when the other microbatches repeat them.

    Microbatch j runs ``begin(j)`` later: ``interval * j``, or where microbatches go in groups
    (interleaved 1F1B, CM's appendix G) ``interval`` for each group and ``step`` within one.

    Attributes:
        placement: rank and chunk of every stage.
        interval: time between two groups; the passes of one rank fill it completely when it is
            3 per chunk and microbatch of a group.
        offsets: (op, stage) -> start of that pass for microbatch 0. A stage has an F, and a B and
            a W or, for both in one, a BW, which takes 2.
        group: microbatches of a group.
        step: time between two microbatches of a group, where it has more than one.
    """

    placement: Placement
    interval: int
    offsets: dict[tuple[Op, int], int]
    group: int = 1
    step: int = 0

    def begin(self, microbatch: int) -> int:
        """How much later than microbatch 0 this one runs."""
        whole, rest = divmod(microbatch, self.group)
        return self.interval * whole + self.step * rest

    def lifespan(self, stage: int) -> tuple[int, int]:
        """From the start of a stage's F to the end of its W (or BW): its set is needed so long."""
        fused = self.offsets.get((Op.BW, stage))
        end = self.offsets[Op.W, stage] + 1 if fused is None else fused + 2
        return self.offsets[Op.F, stage], end

    def peak(self, stages: Sequence[int] | None = None) -> int:
        """Most activation sets of ``stages`` (default: of any rank's) in the steady state."""
        most = 0
        later = [self.step * i for i in range(self.group)]
        for row in self.placement.stages if stages is None else [stages]:
            spans = [(x + b, x + e) for b, e in map(self.lifespan, row) for x in later]
            for at, _ in spans:
                # Started by then, less ended: floors that count the same microbatches.
                sets = sum(
                    (at - begin) // self.interval - (at - end) // self.interval
                    for begin, end in spans
                )
                most = max(most, sets)
        return most

    @property
    def fused(self) -> set[int]:
        """Stages whose B and W are one pass."""
        return {stage for op, stage in self.offsets if op is Op.BW}

    def rows(self, tasks: Tasks) -> Rows:
        """Every rank's passes in the order of the block, repeated for every unit of a table on its
        placement; the order can be executed, as the offsets respect the dependencies.

        Where microbatches have slices, all B's come later by as long as a microbatch's last slice
        begins behind its first.
        """
        most = max(Counter(tasks.microbatch).values()) - 1
        begins = [self.begin(place) for place in range(tasks.units + most)]
        late = max(behind - own for own, behind in zip(begins, begins[most:]))
        width = len(tasks.rank).bit_length()
        passes: Rows = [[] for _ in range(tasks.placement.pp)]
        keys: Rows = [[] for _ in passes]  # time, then place in the row of passes
        # Where two passes meet, the first one by name comes first.
        names = [(op.value, stage, lane) for lane, (op, stage) in enumerate(tasks.lanes)]
        for _, stage, lane in sorted(names):
            op, rank = Op(tasks.lanes[lane][0]), tasks.placement.rank_of(stage)
            first = self.offsets[op, stage] + (0 if op is Op.F else late)
            places = enumerate(begins[: tasks.units], start=len(passes[rank]))
            keys[rank] += [first + at << width | place for place, at in places]
            passes[rank] += tasks.lane_order(lane)
        mask = (1 << width) - 1
        return [[row[key & mask] for key in sorted(own)] for row, own in zip(passes, keys)]

    def table(self, microbatches: int) -> Tasks:
        """Its passes for whole microbatches at equal times."""
        times = Durations.unit(self.placement)
        return Tasks(self.placement, times, microbatches, fused=self.fused)

    def stamp(self, microbatches: int) -> RankActions:
        """``rows`` for whole microbatches, as actions."""
        tasks = self.table(microbatches)
        return tasks.actions(self.rows(tasks))


def vee_block(
    pp: int,
    down: int | Sequence[int],
    up: int | Sequence[int],
    f_turn: int,
    loss_turn: int,
    b_turn: int,
    *,
    b_steps: tuple[Sequence[int], Sequence[int]] | None = None,
    late_w: bool = False,
) -> Block:
    """A block on the V placement (CM, section 4): F of both chunks, then B of both, then W.

    The peak is about (down + up)/6 of 1F1B's (CM, section 4.2), because the lifespans of the two
    chunks of a rank sum to the same number on every rank.

    Args:
        pp: pipeline ranks.
        down: time from one rank to the next where the passes go towards the last rank
            (F of chunk 0, B of chunk 1; CM's equation 2 wants them equal). One number, or one for
            each of the p-1 hops.
        up: the same on the way back (F of chunk 1, B of chunk 0); entry i is the hop between
            ranks i and i+1.
        f_turn, b_turn: time from the first to the second of the two passes on the last rank.
        loss_turn: time from the last F to the first B, on rank 0.
        b_steps: (down, up) for the B's where they differ from the F's.
        late_w: of the two ways to place the two W's take the one with the longer waits.

    Raises:
        ValueError: two passes of one rank fall on the same time modulo the interval, 6.
    """
    hops = pp - 1
    downs, ups = _times(down, hops), _times(up, hops)
    b_down, b_up = (down, up) if b_steps is None else b_steps
    b_downs, b_ups = _times(b_down, hops), _times(b_up, hops)
    offsets: dict[tuple[Op, int], int] = {}
    end_f = downs[-1] + f_turn + ups[-1]
    end_b = end_f + loss_turn + b_downs[-1] + b_turn
    for rank in range(pp):
        first, second = rank, 2 * pp - 1 - rank
        f0, f1, b1 = downs[rank], end_f - ups[rank], end_f + loss_turn + b_downs[rank]
        b0 = end_b + b_ups[-1] - b_ups[rank]
        taken = {f0 % INTERVAL, f1 % INTERVAL, b1 % INTERVAL, b0 % INTERVAL}
        if len(taken) != 4:
            raise ValueError(f"passes of rank {rank} collide: F and B at {f0, f1, b1, b0}")
        offsets |= {(Op.F, first): f0, (Op.F, second): f1}
        offsets |= {(Op.B, first): b0, (Op.B, second): b1}
        offsets[Op.W, first], offsets[Op.W, second] = w_times(taken, b0, b1, late_w)
    return Block(Placement.vee(pp), INTERVAL, offsets)


def w_times(taken: set[int], b0: int, b1: int, late: bool = False) -> tuple[int, int]:
    """When the W's of a rank's two B's start, in the two residues that F and B do not take.

    Of the two ways the one whose longer wait is as short as possible, or if ``late`` the other.
    """
    one, other = (x for x in range(INTERVAL) if x not in taken)
    ways = [(one, other), (other, one)]
    waits = [((x - b0 - 1) % INTERVAL, (y - b1 - 1) % INTERVAL) for x, y in ways]
    waits.sort(key=max)  # equal only where both ways are: their sums differ by 0 or 6
    w0, w1 = waits[late]
    return b0 + 1 + w0, b1 + 1 + w1


def _times(steps: int | Sequence[int], hops: int) -> tuple[int, ...]:
    """Time from rank 0 to every rank."""
    return _sums((steps,) * hops if isinstance(steps, int) else tuple(steps))


@lru_cache(maxsize=256)
def _sums(steps: tuple[int, ...]) -> tuple[int, ...]:
    # A search asks for the same few steps with all turns.
    return tuple(accumulate(steps, initial=0))
