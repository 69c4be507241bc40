"""Lower bounds on the makespan, to say how good a schedule is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from .actions import Op, Operation
from .costs import Costs, Durations
from .engine import earliest
from .placement import Placement
from .tasks import Tasks
from .vocabulary import G, S, Vocabulary


class Bound(NamedTuple):
    """A lower bound and what it comes from.

    Attributes:
        value: in the units of the costs.
        kind: ``work``, the way to a rank and all its passes; ``way``, what a rank or a stage waits
            for microbatches that are on their way; ``memory``, what a rank waits because only so
            many activation sets fit; ``lifespan``, how long the sets stay (Little's law).
    """

    value: Fraction
    kind: str


def makespan_bound(
    placement: Placement, microbatches: int, costs: Costs, memory_cap: int | None = None
) -> Fraction:
    """``lower_bound`` of the makespan with split backward passes, in the units of the costs."""
    return lower_bound(placement, microbatches, costs, memory_cap).value


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory_cap: int | None = None,
    *,
    fused: bool = False,
    vocabulary: Vocabulary | None = None,
    pairs: bool = False,
) -> Bound:
    """Least time of any order on ``placement``.

    The largest of these. A rank's work after the way to it. A stage's F's or B's, and one
    microbatch's way before and after them. On each rank the idle time before its first B, and
    before the first F of a later one of its stages, when it runs no more F's than fit in memory
    ("Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 3), and its idle time after its
    last F, when it runs B and W only of the sets that are resident. And Little's law: at most
    ``memory_cap`` sets are resident, each for its microbatch's way to the loss and back, and their
    number changes by one a pass at both ends. In V placement at F=B=W without hops that is CM's
    bound (arXiv 2405.15362, figure 13) where memory binds.

    A fused BW is no faster than its passes one by one, so the bound holds for orders with it.

    Args:
        placement: rank and chunk of every stage.
        microbatches: of one iteration, >= 1.
        costs: of the passes and hops.
        memory_cap: most activation sets (one chunk's for one microbatch) on a rank, counted from
            F's start to W's end; None for no cap.
        fused: of orders in which B and W are one pass, BW; these cannot be as fast.
        vocabulary: passes of a sharded one, which all ranks have.
        pairs: of orders with joint passes (``F3.1+B4.0``), too, whose communication takes no time
            of its own; the bound is of their computation alone.

    Raises:
        ValueError: per-stage costs for another number of stages.
    """
    d = costs.durations(placement)
    if pairs:
        d = d.computation()
    if fused:
        whole = tuple(b + w for b, w in zip(d.backward_input, d.backward_weight))
        d = d._replace(backward_input=whole, backward_weight=(0,) * len(whole))
    shared = _Shared() if vocabulary is None else _Shared.of(vocabulary, d)
    way = _Way.of(placement, d, vocabulary)
    found = list(_of_stages(microbatches, d, way))
    for row in placement.stages:
        rank = _Rank.of(row, microbatches, d, way, shared)
        found.append((Fraction(rank.before_first_f + rank.work), "work"))
        found.append((Fraction(rank.work + rank.idle(None)), "way"))
        if memory_cap is not None and memory_cap < microbatches * len(row):
            found.append((Fraction(rank.work + rank.idle(memory_cap)), "memory"))
            found.append((way.f_start[row[0]] + rank.lifespan(memory_cap), "lifespan"))
    value = max(value for value, _ in found)
    kinds = {kind for at, kind in found if at == value}
    return Bound(value / d.scale, next(k for k in _KINDS if k in kinds))


_KINDS = ("work", "way", "memory", "lifespan")  # of equal bounds the simplest is named


class _Shared(NamedTuple):
    """Vocabulary passes of every rank, of one microbatch.

    Attributes:
        before: what a rank runs before its first F.
        between: from the last stage's F to its B.
        behind: at any time after that B.
    """

    before: int = 0
    between: int = 0
    behind: int = 0

    @classmethod
    def of(cls, vocabulary: Vocabulary, d: Durations) -> _Shared:
        s, t, e, g = d.vocabulary
        return cls(e, s, t + g) if vocabulary.embeddings else cls(0, s, t)


class _Way(NamedTuple):
    """One microbatch as early as data allows: starts of F and B, and ends of W, of every stage.

    The end of stage 0 is also that of the embeddings' gradients. ``shared`` is when all ranks have
    the last stage's output.
    """

    f_start: list[int]
    b_start: list[int]
    w_end: list[int]
    shared: int

    @classmethod
    def of(cls, placement: Placement, d: Durations, vocabulary: Vocabulary | None) -> _Way:
        tasks = Tasks(placement, d, 1, vocabulary=vocabulary)
        start: dict[Operation, list[int]] = {op: [] for op, _ in tasks.lanes}
        end: dict[Operation, list[int]] = {op: [] for op, _ in tasks.lanes}
        for (op, _), at, took in zip(tasks.lanes, earliest(tasks), tasks.duration):
            start[op].append(at)
            end[op].append(at + took)
        w_end = end[Op.W]
        w_end[0] = max([w_end[0], *end.get(G, ())])
        return cls(start[Op.F], start[Op.B], w_end, max(start.get(S, end[Op.F])))

    def rest(self, stage: int) -> int:
        """From the start of B of ``stage`` to the last end of W of the stages up to it."""
        return max(end for s, end in enumerate(self.w_end) if s <= stage) - self.b_start[stage]


def _of_stages(m: int, d: Durations, way: _Way) -> Iterator[tuple[Fraction, str]]:
    """All F's, or all B's, of one stage, one microbatch's way before and the last one's after."""
    for s, end in enumerate(accumulate(way.w_end, max)):
        yield Fraction(end + (m - 1) * d.forward[s]), "way"
        yield Fraction(end + (m - 1) * d.backward_input[s]), "way"


class _Rank(NamedTuple):
    """What one rank's time is made of.

    Attributes:
        row: its stages.
        work: of all its passes.
        first_f, first_b: by stage, the earliest start of any.
        after_f, after_b: by stage, the least time from the start of the last one to the end.
        shared: its vocabulary passes, and when the first S can run.
    """

    row: tuple[int, ...]
    microbatches: int
    durations: Durations
    work: int
    first_f: list[int]
    first_b: list[int]
    after_f: list[int]
    after_b: list[int]
    shared: _Shared
    first_s: int

    @classmethod
    def of(
        cls,
        row: tuple[int, ...],
        microbatches: int,
        d: Durations,
        way: _Way,
        shared: _Shared,
    ) -> _Rank:
        after_b = [way.rest(s) for s in row]
        return cls(
            row,
            microbatches,
            d,
            microbatches
            * (sum(_whole(d, s) for s in row) + shared.before + shared.between + shared.behind),
            [way.f_start[s] for s in row],
            [way.b_start[s] for s in row],
            [way.b_start[s] - way.f_start[s] + after for s, after in zip(row, after_b)],
            after_b,
            shared,
            way.shared,
        )

    @property
    def before_first_f(self) -> int:
        """Least idle time before the first F: only E can run there."""
        return max(0, self.first_f[0] - self.microbatches * self.shared.before)

    def idle(self, cap: int | None) -> int:
        """Least idle time, at most ``cap`` sets being resident."""
        m, d, row = self.microbatches, self.durations, self.row
        sets = m * len(row) if cap is None else cap
        few = min(sets, m)
        # By stage. Before its first B nothing of the stages up to it has left memory, and its own
        # sets bound the microbatches that are in later ones. Likewise after its last F.
        # Nor is T of a microbatch done before its B of the last stage, and that before any other;
        # E needs none, and after the last F there is none; T and G wait as long as they like.
        some = few * (self.shared.between + self.shared.behind)
        early, late = m * self.shared.before, m * self.shared.behind
        heads, tails = [], []
        for i, s in enumerate(row):
            later = few * sum(_whole(d, x) for x in row[i + 1 :])
            forward = self._most((d.forward[x] for x in row[: i + 1]), sets)
            heads.append(self.first_b[i] - forward - later - some - early)
            backward = self._most((d.backward_input[x] + d.backward_weight[x] for x in row), sets)
            passes = backward + later + few * self.shared.between + late
            tails.append(self.after_f[i] - d.forward[s] - passes)
        # Before a later stage's first F there are F's of earlier ones and E's only, and one set is
        # left for it; before the first S there are F's and E's.
        for i in range(1, len(row)):
            forward = self._most((d.forward[x] for x in row[:i]), sets - 1)
            heads[-1] = max(heads[-1], self.first_f[i] - forward - early)
        forward = self._most((d.forward[x] for x in row), sets)
        heads[-1] = max(heads[-1], self.first_s - forward - early)
        head, tail = self.before_first_f, 0
        # After the last B of all, W's of what is resident.
        weights = self._most((d.backward_weight[x] for x in row), sets)
        tail = max(tail, self.after_b[0] - d.backward_input[row[0]] - weights - late)
        # A head and a tail are apart unless all F's of a stage come before a B.
        first = max(head, *heads) + tail
        last = head + max(tail, *tails)
        both = 0
        if m > sets:
            both = max(heads) + max(tails)
        elif m * len(row) > sets:
            both = heads[-1] + tails[-1]
        return max(first, last, both)

    def _most(self, times: Iterable[int], count: int) -> int:
        """Longest time that ``count`` passes take, of so many microbatches' of each."""
        total = 0
        for time in sorted(times, reverse=True):
            now = min(count, self.microbatches)
            total += now * time
            count -= now
        return total

    def lifespan(self, cap: int) -> Fraction:
        """Least span of the rank by Little's law.

        The first sets come one F after the other, and the last ones leave one W (or BW) after the
        other; there are more than ``cap`` sets, so that these two phases are apart.
        """
        d = self.durations
        stays = sum(
            b - f + d.backward_input[s] + d.backward_weight[s]
            for s, f, b in zip(self.row, self.first_f, self.first_b)
        )
        comes = min(d.forward[s] for s in self.row)
        leaves = min(d.backward_weight[s] or d.backward_input[s] for s in self.row)
        return Fraction(self.microbatches * stays, cap) + Fraction((cap - 1) * (comes + leaves), 2)


def _whole(d: Durations, stage: int) -> int:
    return d.forward[stage] + d.backward_input[stage] + d.backward_weight[stage]
