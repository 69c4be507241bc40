"""Event simulator: when every pass of a schedule runs, and what that says about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from . import grid
from .actions import DEVICE_STEPS, Action, Op
from .copies import Copies, Copy
from .costs import Costs, Durations
from .link import Link
from .schedule import Schedule, ScheduleError


@dataclass(frozen=True)
class Transfers:
    """What the simulation says on offloaded sets.

    Attributes:
        link: how they travel.
        copies: per rank, every copy by start time; times in 1/``scale`` of the simulation.
        moments: per rank, when its computation reaches each of its offload actions, in order; a
            RELEASE when its copy has ended.
        ranks: per rank, its compute and offload actions.
        peak_host_sets: per rank, the most sets that have a copy on the host at once.
        stall: how much longer than without offload the makespan is, in units of the costs.
    """

    link: Link
    copies: list[list[Copy]]
    moments: list[list[int]]
    ranks: tuple[tuple[Action, ...], ...]
    peak_host_sets: list[int]
    stall: Fraction

    @property
    def sets(self) -> int:
        """Sets that are offloaded, over all ranks."""
        return sum(copy.action.op is Op.OFFLOAD for row in self.copies for copy in row)


@dataclass(frozen=True)
class Simulation:
    """The simulated run of one schedule. Times are in the units of the costs.

    Attributes:
        schedule: the schedule with its compute actions only.
        start, end: ``start[rank][i]`` of the i-th compute action of that rank, in units of
            1/``scale``; the first action of all starts at 0.
        scale: divide ``start`` and ``end`` by it to get the units of the costs.
        makespan: first start to last end over all ranks.
        bubble: mean over ranks of the share of the makespan in which the rank computes nothing.
            For uniform stages that is 1 - m(F+B+W)/makespan.
        span_bubble: the same with the longest single rank's span, its own first start to its own
            last end, in place of the makespan.
        peak_sets: per rank, the most activation sets resident at once. A set is one chunk's
            activations of one microbatch, resident from its F's start to its W's (or BW's) end,
            except from its RELEASE to its PREPARE if it is offloaded.
            A forward-only schedule keeps nothing for a backward pass: 0.
        peak_activation: ``peak_sets`` in microbatches, i.e. divided by the chunks per rank.
        transfers: of offloaded sets; None if none are.
    """

    schedule: Schedule
    start: list[list[int]]
    end: list[list[int]]
    scale: int
    makespan: Fraction
    bubble: Fraction
    span_bubble: Fraction
    peak_sets: list[int]
    peak_activation: list[Fraction]
    transfers: Transfers | None = field(default=None, compare=False)

    @property
    def peak_host_activation(self) -> list[Fraction]:
        """Most sets on the host of each rank, in microbatches."""
        if self.transfers is None:
            return [Fraction(0)] * self.schedule.pp
        return [Fraction(n, self.schedule.chunks) for n in self.transfers.peak_host_sets]

    def memory_curve(self, rank: int) -> list[tuple[int, int]]:
        """Steps (time in 1/scale, resident sets from then on) of one rank, times increasing."""
        if not any(self.peak_sets):
            return [(0, 0)]
        curve = [(0, 0)]
        for step, time in self._steps(rank):
            # A set freed and one allocated at the same moment are one step: the curve shows what
            # is resident, and the rank frees before it allocates.
            sets = curve[-1][1] + step
            if curve[-1][0] == time:
                curve[-1] = (time, sets)
            else:
                curve.append((time, sets))
        return curve

    def _steps(self, rank: int) -> Iterable[tuple[int, int]]:
        passes = iter(zip(self.start[rank], self.end[rank]))
        moments = iter(() if self.transfers is None else self.transfers.moments[rank])
        row = (self.schedule if self.transfers is None else self.transfers).ranks[rank]
        for action in row:
            start, end = next(passes) if action.is_compute else (next(moments),) * 2
            step = DEVICE_STEPS.get(action.op)
            if step is not None:
                yield step, start if step > 0 else end


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run ``schedule`` as early as its order and its data dependencies allow.

    A rank runs one pass at a time in the given order. F of stage s waits for F of stage s-1,
    B (or BW) for its own F and the B of stage s+1, W for its B; a dependency on another rank adds
    one hop. Communication actions are ignored. Linear in the number of actions.

    Offloaded sets travel beside the passes. A rank's computation reaches its offload actions when
    the pass before them has ended; a copy can start when it does, and when its link is free (see
    ``Link.uses``). RELEASE waits for the end of its OFFLOAD's copy, B for that of its RELOAD's.

    Args:
        schedule: lowered or not; assumed complete (see ``check``).
        costs: default ``schedule.costs``.

    Raises:
        ScheduleError: the order cannot progress, or holds an action twice.
        ValueError: per-stage costs for another number of stages.
    """
    compute = schedule.compute()
    durations = (schedule.costs if costs is None else costs).durations(schedule.placement)
    link, transfers = schedule.link, None
    if schedule.has_offload:
        if link is None:
            raise ScheduleError("the schedule offloads sets, but does not say how they travel")
        times = link.times(schedule.placement, durations)
        durations, full = times.durations, schedule.unlowered()
        copies = Copies(times, link, schedule.placement)
        start, end, moments = _run(full, durations, copies)
        stall = _last(end) - _last(run_times(compute, durations)[1])
        transfers = Transfers(
            link,
            copies.done,
            moments,
            full.ranks,
            peak_host_sets(full.ranks),
            Fraction(stall, durations.scale),
        )
    else:
        start, end = run_times(compute, durations)
    last = _last(end)
    span = max((e[-1] - s[0] for s, e in zip(start, end) if s), default=0)
    work = sum(e - s for ss, ee in zip(start, end) for s, e in zip(ss, ee))
    sets = peak_sets(schedule.ranks)
    return Simulation(
        schedule=compute,
        start=start,
        end=end,
        scale=durations.scale,
        makespan=Fraction(last, durations.scale),
        bubble=1 - Fraction(work, compute.pp * last) if last else Fraction(0),
        span_bubble=1 - Fraction(work, compute.pp * span) if span else Fraction(0),
        peak_sets=sets,
        peak_activation=[Fraction(count, compute.chunks) for count in sets],
        transfers=transfers,
    )


def peak_sets(ranks: Sequence[Sequence[Action]]) -> list[int]:
    """Most activation sets resident at once on each rank; depends on the order only.

    0 everywhere if no rank has a backward action: a forward-only schedule keeps no sets.
    """
    if not any(action.op in _FREES for row in ranks for action in row):
        return [0] * len(ranks)
    return [_peak(row, DEVICE_STEPS) for row in ranks]


def peak_host_sets(ranks: Sequence[Sequence[Action]]) -> list[int]:
    """Most sets with a copy on the host at once on each rank; depends on the order only.

    A host copy is there from its OFFLOAD to its B (or BW), which waits for the copy back.
    """
    peaks = []
    for row in ranks:
        away = {(stage, j) for op, stage, j in row if op is Op.OFFLOAD}
        mine = [a for a in row if a[1:] in away]
        peaks.append(_peak(mine, _HOST_STEPS))
    return peaks


def _peak(row: Sequence[Action], steps: dict[Op, int]) -> int:
    sets = peak = 0
    for action in row:
        step = steps.get(action.op)
        if step is not None:
            sets += step
            if sets > peak:
                peak = sets
    return peak


_FREES = frozenset({Op.W, Op.BW})
# As ``DEVICE_STEPS``, on the host.
_HOST_STEPS = {Op.OFFLOAD: 1, Op.B: -1, Op.BW: -1}

_Times = list[list[int]]


def run_times(schedule: Schedule, durations: Durations) -> tuple[_Times, _Times]:
    """Start and end of every action of a schedule of compute actions only, rank by rank.

    Raises:
        ScheduleError: as ``simulate``.
    """
    return _run(schedule, durations, None)[:2]


def _run(
    schedule: Schedule, durations: Durations, copies: Copies | None
) -> tuple[_Times, _Times, _Times]:
    """Start and end of every compute action, and the moments of the others (see ``Transfers``).

    A rank runs until it lacks an input; whoever produces that input wakes it again, so every
    action is looked at a few times only. Copies are started when no rank can go on without: the
    first of them cannot be overtaken any more then.
    """
    rank_of = [schedule.placement.rank_of(s) for s in range(schedule.placement.num_stages)]
    ends: tuple[dict[tuple[int, int], int], ...] = ({}, {}, {})  # of F, B, W by (stage, microbatch)
    waiting: dict[tuple[int, int, int], int] = {}  # (kind, stage, microbatch) -> rank
    clock, at = [0] * schedule.pp, [0] * schedule.pp
    start: _Times = [[] for _ in schedule.ranks]
    end: _Times = [[] for _ in schedule.ranks]
    moments: _Times = [[] for _ in schedule.ranks]
    awake = list(range(schedule.pp - 1, -1, -1))
    while True:
        if not awake and copies is not None:
            awake += copies.start_next()
        if not awake:
            break
        rank = awake.pop()
        row, time = schedule.ranks[rank], clock[rank]
        for position in range(at[rank], len(row)):
            op, stage, microbatch = row[position]
            if copies is not None:
                ready = copies.reach(rank, row[position], time)
                if ready is None:
                    break
                time = ready
                if op not in _OUTPUTS:
                    moments[rank].append(time)
                    clock[rank], at[rank] = time, position + 1
                    continue
            for kind, other in inputs(op, stage, len(rank_of)):
                ready = ends[kind].get((other, microbatch))
                if ready is None:
                    waiting[kind, other, microbatch] = rank
                    break
                time = max(time, ready + (durations.hop if rank_of[other] != rank else 0))
            else:
                start[rank].append(time)
                time += durations.of(op, stage)
                end[rank].append(time)
                clock[rank], at[rank] = time, position + 1
                for kind in outputs(op):
                    if (stage, microbatch) in ends[kind]:
                        what = f"rank {rank}: {row[position]} repeats a pass that has already run"
                        raise ScheduleError(
                            f"{what}\n{grid.around(schedule.ranks, rank, position)}"
                        )
                    ends[kind][stage, microbatch] = time
                    woken = waiting.pop((kind, stage, microbatch), None)
                    if woken is not None:
                        awake.append(woken)
                continue
            break
    if any(position < len(row) for position, row in zip(at, schedule.ranks)):
        raise _cannot_progress(schedule, at, ends)
    return start, end, moments


def _last(end: _Times) -> int:
    return max((row[-1] for row in end if row), default=0)


_KINDS = (Op.F, Op.B, Op.W)
_OUTPUTS = {Op.F: (0,), Op.B: (1,), Op.W: (2,), Op.BW: (1, 2)}


def outputs(op: Op) -> tuple[int, ...]:
    """What a compute action completes: 0 the F, 1 the B, 2 the W of its stage and microbatch."""
    return _OUTPUTS[op]


def inputs(op: Op, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """(kind as in ``outputs``, stage) of what a compute action waits for, same microbatch."""
    if op is Op.F:
        return ((0, stage - 1),) if stage else ()
    if op is Op.W:
        return ((1, stage),)
    return ((0, stage), (1, stage + 1)) if stage + 1 < num_stages else ((0, stage),)


def _cannot_progress(
    schedule: Schedule, positions: list[int], ends: Sequence[dict[tuple[int, int], int]]
) -> ScheduleError:
    """Says what every rank waits for, first of all the ranks that wait for each other."""
    n = schedule.placement.num_stages
    reasons: list[str] = []
    owners: list[int | None] = []
    for row, at in zip(schedule.ranks, positions):
        if at == len(row):
            reasons.append("done")
            owners.append(None)
            continue
        action = row[at]
        kind, stage = next(
            (k, s)
            for k, s in inputs(action.op, action.stage, n)
            if (s, action.microbatch) not in ends[k]
        )
        owner = schedule.placement.rank_of(stage)
        fused = Action(Op.BW, stage, action.microbatch)
        needs = (
            fused if kind and fused in schedule.ranks[owner] else fused._replace(op=_KINDS[kind])
        )
        reasons.append(f"{action} waits for {needs} of rank {owner}")
        owners.append(owner)
    circle = grid.wait_cycle(owners)
    first = circle[0]
    why = f"rank {first}, position {positions[first]}: {reasons[first]}"
    if len(circle) > 1:
        why += f"; ranks {', '.join(map(str, circle))} wait for each other in a circle"
    elif owners[first] == first:
        why += ", which stands later on the same rank or nowhere"
    else:
        why += ", which has finished without it"
    return ScheduleError(
        f"the order cannot progress: {why}\n{grid.stuck(schedule.ranks, positions, reasons)}"
    )
