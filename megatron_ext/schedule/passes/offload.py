"""The offload pass: the activation sets to offload, and the times of their copies.

PipeOffload (arXiv 2503.01328), section 4. Works on any schedule of compute actions. Under the costs
and times it is given, its copies delay no pass: they go where the link is idle, around the passes
as they would run without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..actions import Action, AnyAction, Op
from ..costs import Durations
from ..effects import peak_sets
from ..link import Link, LinkTimes
from ..schedule import Schedule
from ..simulate import run_times, simulate
from ..tasks import sources
from ..units import Unit, UnitCosts
from .placing import ActivationSet, Passes, Placing

Row = tuple[AnyAction, ...]

SHORT = "needed again before both copies could finish"
FULL = "the link is taken"
SPARE = "not chosen"


@dataclass(frozen=True)
class OffloadPlan:
    """A schedule with offload actions, and the number of sets offloaded and kept.

    Attributes:
        schedule: compute and offload actions; ``link`` set if there are any of the latter.
        moved: ``moved[rank][chunk]``, sets that are offloaded.
        kept: per rank, how many sets stay for which reason (``SHORT``, ``FULL``, ``SPARE``).
        stall: how much longer the makespan is than without, in the units of the costs.
        peak_sets: per rank, the most sets on the device at once.
    """

    schedule: Schedule
    moved: list[list[int]]
    kept: list[Counter[str]]
    stall: Fraction
    peak_sets: list[int]

    @property
    def note(self) -> str:
        """One sentence: how many sets leave, how many stay and why."""
        kept: Counter[str] = sum(self.kept, Counter())
        moved = sum(map(sum, self.moved))
        why = [f"{count}: {reason}" for reason, count in kept.most_common()]
        stay = f"; {sum(kept.values())} stay ({', '.join(why)})" if why else ""
        return f"{moved} activation sets are offloaded{stay}"


def wanted_chunks(text: str, chunks: int) -> Fraction | None:
    """The value of ``--offload`` in chunks per rank; None for ``auto``.

    Raises:
        ValueError: it is none of these, or more chunks than there are.
    """
    if text == "auto":
        return None
    if text in ("half", "full"):
        return Fraction(-(-chunks // 2) if text == "half" else chunks)
    try:
        number = int(text)
    except ValueError:
        raise ValueError(
            f"offload must be off, half, full, auto or a number of chunks, got {text!r}"
        ) from None
    if not 0 <= number <= chunks:
        raise ValueError(
            f"cannot offload {number} chunks of a rank that has {chunks}; give 0 to {chunks}"
        )
    return Fraction(number)


def offload(
    schedule: Schedule,
    link: Link,
    chunks: int | Fraction | str = "auto",
    *,
    most_sets: int | None = None,
) -> OffloadPlan:
    """Insert OFFLOAD, RELEASE, PREPARE and RELOAD into every rank's order.

    Passes of a sharded vocabulary have to be there already.

    Never fails because something cannot travel: that stays, and the plan says why. Sets of the
    chunk with the longest lifespan go first; part of a chunk is every so many of its microbatches.
    Deterministic, and the same whatever the costs are multiplied by.

    Args:
        schedule: whose compute actions are taken, in their order; other actions are dropped.
        link: the transfer times of every rank or stage.
        chunks: how many of a rank's chunks: a number, ``half`` (rounded up) or ``full``, which
            may stall where their link cannot carry so much; or ``auto``, on every rank what
            brings its peak lowest while no pass waits, and of several such plans most sets.
        most_sets: a cap on the sets on the device: ranks that fit stop there (with ``auto``).

    Raises:
        ValueError: ``chunks`` out of range, or the link is for another number of ranks or stages.
        ScheduleError: the order of the passes cannot progress.
    """
    base = schedule.compute()
    wanted = wanted_chunks(str(chunks), base.chunks) if not isinstance(chunks, Fraction) else chunks
    times = link.times(base.placement, base.costs.durations(base.placement).reduced())
    planner = _Planner(base, link, times)
    if wanted is not None:
        return planner.forced(wanted)
    return planner.free(most_sets)


_STOP_AFTER = 6  # shares in a row that are no better
# Shares of its time asked of a link: more is not tried; up to this, fewer sets do not help.
_CROWDED, _EASY = Fraction(9, 8), Fraction(3, 4)


class _Planner:
    """Shared data of all attempts on one schedule."""

    def __init__(self, base: Schedule, link: Link, times: LinkTimes) -> None:
        self.base, self.link, self.times = base, link, times
        # Copies take their time of a unit's share, as passes do; a whole set is 1 without units.
        self.units: Sequence[UnitCosts] | None = None
        self.whole = 1
        if base.has_units:
            self.units, self.whole = base.unit_costs()
        self.passes = list(map(Passes, *run_times(base, times.durations)))
        # A set that comes back between an F and a B needs the time between them. Those of the last
        # stage have not the time to travel, and their logits may take long.
        items = (item for rank in range(base.pp) for item in self._sets_of(rank))
        margin = max((item.h2d for item in items if item.travels), default=0)
        hop = times.durations.hop * self.whole
        durations = times.durations._replace(hop=hop)
        self.passes = _late_forwards(base, self.passes, durations, margin)
        self.sets = [self._sets_of(rank) for rank in range(base.pp)]
        self.order = [self._by_lifespan(rank) for rank in range(base.pp)]

    def _sets_of(self, rank: int) -> list[ActivationSet]:
        row, passes = self.base.ranks[rank], self.passes[rank]
        first = {p[1:]: i for i, a in enumerate(row) for p in a.parts if p.op is Op.F}
        return [
            ActivationSet(
                rank,
                stage,
                j,
                first[stage, j],
                i,
                passes.end[first[stage, j]],
                passes.start[i],
                self.times.to_host[stage] * self._size(j),
                self.times.to_device[stage] * self._size(j),
            )
            for i, action in enumerate(row)
            for op, stage, j in action.parts
            if (op is Op.B or op is Op.BW) and (stage, j) in first
        ]

    def _size(self, unit: int) -> int:
        """Of a unit's set, in parts of a whole one."""
        return 1 if self.units is None else self.units[unit].size

    def _peak(self, rank: int, placing: Placing) -> int:
        """Most on the rank's device, in parts of a whole set."""
        return peak_sets([self.row(rank, placing)], self.units)[0]

    def _by_lifespan(self, rank: int) -> list[int]:
        """The rank's stages, longest mean lifespan first, the earlier stage of equals."""
        spans = dict.fromkeys(self.base.placement.stages[rank], 0)
        for item in self.sets[rank]:
            spans[item.stage] += item.gap
        return sorted(spans, key=lambda stage: (-spans[stage], stage))

    def chosen(self, rank: int, chunks: Fraction) -> list[ActivationSet]:
        """Sets of so many of the rank's chunks; of a part of a chunk, evenly spread."""
        share = {
            stage: min(max(chunks - place, Fraction(0)), Fraction(1))
            for place, stage in enumerate(self.order[rank])
        }
        slices = self.base.slices
        return [i for i in self.sets[rank] if _is_in(share[i.stage], i.microbatch, slices)]

    def placing(self, rank: int, chunks: Fraction, pace: Fraction = Fraction(1)) -> Placing:
        """Copies of so many chunks' sets. ``pace`` > 1: as if the link were that much faster."""
        chosen, passes = self.chosen(rank, chunks), self.passes[rank]
        if pace != 1:  # in integers, time goes slower for the passes instead
            up, down = pace.numerator, pace.denominator
            chosen = [
                item._replace(
                    saved_at=item.saved_at * up,
                    needed_at=item.needed_at * up,
                    d2h=item.d2h * down,
                    h2d=item.h2d * down,
                )
                for item in chosen
            ]
            passes = Passes([t * up for t in passes.start], [t * up for t in passes.end])
        return Placing(chosen, passes)

    def free(self, most_sets: int | None) -> OffloadPlan:
        """Of every rank what brings its peak lowest, or under ``most_sets``; no pass waits."""
        ranks = range(self.base.pp)
        if most_sets is not None:
            return self.plan([self._fitting(rank, most_sets) for rank in ranks])
        return self.plan([self._lowest(rank) for rank in ranks])

    def _lowest(self, rank: int) -> Placing:
        """The lowest peak, and of several such most sets."""
        best: tuple[tuple[int, int], Placing] | None = None
        since = 0  # shares without a better one
        for chunks in reversed(self._shares()):
            load = self._load(rank, chunks)
            if load > _CROWDED:
                continue
            placing = self.placing(rank, chunks)
            score = self._peak(rank, placing), -len(placing.placed)
            since += 1
            if best is None or score < best[0]:
                best, since = (score, placing), 0
            if since == _STOP_AFTER or (load <= _EASY and not placing.full):
                break  # the link is no longer what is short
        assert best is not None  # no chunk at all is one of the shares
        return best[1]

    def _fitting(self, rank: int, most_sets: int) -> Placing:
        """The first share that fits; else what exceeds the cap least."""
        best: tuple[int, Placing] | None = None
        for chunks in self._shares():
            placing = self.placing(rank, chunks)
            over = self._peak(rank, placing) - most_sets * self.whole
            if best is None or over < best[0]:
                best = over, placing
            if over <= 0:
                break
        assert best is not None
        return best[1]

    def _shares(self) -> list[Fraction]:
        """Chunks to try, from none to all: in eighths; of more than two, coarser."""
        chunks = self.base.chunks
        step = Fraction(1, 8 if chunks <= 2 else 4 if chunks <= 4 else 2)
        return [step * i for i in range(int(chunks / step) + 1)]

    def forced(self, chunks: Fraction) -> OffloadPlan:
        """So many chunks on every rank; more than the link carries are planned at its pace."""
        return self.plan(
            [
                self.placing(rank, chunks, max(Fraction(1), self._load(rank, chunks)))
                for rank in range(self.base.pp)
            ]
        )

    def _load(self, rank: int, chunks: Fraction) -> Fraction:
        """The share of its time, maybe more than 1, that the busier direction of the rank's link is
        asked for."""
        items = [item for item in self.chosen(rank, chunks) if item.travels]
        if not items:
            return Fraction(0)
        load = max(sum(item.d2h for item in items), sum(item.h2d for item in items))
        span = max(i.needed_at for i in items) - min(i.saved_at for i in items)
        # A sixteenth up: keeps the integers small.
        return Fraction(-(-16 * load // span), 16)

    def row(self, rank: int, placing: Placing) -> Row:
        """The rank's passes with the offload actions between them."""
        out: list[AnyAction] = []
        passes, at = self.base.ranks[rank], 0
        for position, action in placing.actions():
            out += passes[at:position]
            out.append(action)
            at = position
        return (*out, *passes[at:])

    def plan(self, placings: Sequence[Placing]) -> OffloadPlan:
        """Put the ranks' placings together and simulate them."""
        ranks = [self.row(rank, placing) for rank, placing in enumerate(placings)]
        moved = [[0] * self.base.chunks for _ in ranks]
        kept: list[Counter[str]] = [Counter() for _ in ranks]
        for placing in placings:
            for placed in placing.placed:
                item = placed.item
                moved[item.rank][self.base.placement.chunk_of(item.stage)] += 1
            for reason, items in ((SHORT, placing.short), (FULL, placing.full)):
                for item in items:
                    kept[item.rank][reason] += 1
        for rank, sets in enumerate(self.sets):
            spare = len(sets) - sum(moved[rank]) - sum(kept[rank].values())
            if spare:
                kept[rank][SPARE] += spare
        some = any(map(any, moved))
        schedule = replace(self.base.with_ranks(ranks), link=self.link if some else None)
        run = simulate(schedule)
        stall = run.transfers.stall if run.transfers else Fraction(0)
        return OffloadPlan(schedule, moved, kept, stall, run.peak_sets)


def _late_forwards(
    base: Schedule, run: Sequence[Passes], durations: Durations, margin: int
) -> list[Passes]:
    """The same run, every F as late as keeps all other passes where they are, less ``margin``.

    In the warm-up F passes run faster than their sets can leave, and then the rank waits. Copies
    planned for the later times make it wait between them instead, which costs nothing: whatever
    is planned for a run in which every pass has its time can only happen earlier.
    """
    late = [list(row.start) for row in run]
    due: dict[Action, int] = {}  # of a result: latest end
    order = ((at, rank, i) for rank, row in enumerate(run) for i, at in enumerate(row.start))
    for at, rank, i in sorted(order, reverse=True):
        parts = base.ranks[rank][i].parts
        op, stage, j = parts[0]
        if op is Op.F and len(parts) == 1:
            until = [due.get(parts[0], run[rank].end[i]), *late[rank][i + 1 : i + 2]]
            late[rank][i] = at = min(until) - (run[rank].end[i] - run[rank].start[i])
        for op, stage, j in parts:
            for kind, other, lag in sources(op, stage, base.placement, durations, base.vocabulary):
                needed = Action(kind, other, j)
                due[needed] = min(at - lag, due.get(needed, at))
    # Taking the later of two times that keep all dependencies keeps them.
    found = []
    for row, times in zip(run, late):
        start = [max(one, at - margin) for one, at in zip(row.start, times)]
        found.append(Passes(start, [x + e - s for x, s, e in zip(start, row.start, row.end)]))
    return found


def _is_in(share: Fraction, unit: int, slices: Sequence[int]) -> bool:
    """True if a unit is in an evenly spread ``share`` of all; of a microbatch's slices the first
    ones are, whose sets live longest.

    Args:
        slices: of every microbatch; empty: a unit is one.
    """
    number, begin, count = 0, int(unit), 1
    if isinstance(unit, Unit):
        number, begin, count = unit.slice, begin - unit.slice, slices[unit.microbatch]
    return number < int(share * (begin + count)) - int(share * begin)
