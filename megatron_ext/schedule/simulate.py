"""Simulation of a schedule: times of every pass, makespan, bubble and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from . import grid
from .actions import Action, AnyAction, Op
from .copies import Copies, Copy
from .costs import Costs, Durations
from .effects import curve, peak_host_sets, step
from .event_loop import KIND, Node, Program, RepeatedError, Row, Run, run
from .link import Link, LinkTimes
from .schedule import Schedule, ScheduleError
from .tasks import sources
from .vocabulary import peak_held


@dataclass(frozen=True)
class Transfers:
    """Offloaded sets in a simulation.

    Attributes:
        link: their transfer times.
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
    ranks: tuple[tuple[AnyAction, ...], ...]
    peak_host_sets: list[int]
    stall: Fraction

    @property
    def sets(self) -> int:
        """Sets that are offloaded, over all ranks."""
        return sum(copy.action.op is Op.OFFLOAD for row in self.copies for copy in row)


@dataclass(frozen=True)
class Exchange:
    """Communication between experts on one rank, in units of the costs.

    Attributes:
        total: of all its passes.
        exposed: in which it computes nothing.
        steady: the same between its first backward and its last forward pass.
    """

    total: Fraction
    exposed: Fraction
    steady: Exchange | None = None

    @classmethod
    def of(cls, row: Sequence[AnyAction], durations: Durations) -> Exchange:
        """Of one rank's compute actions."""
        rows = [[(part.op, part.stage) for part in action.parts] for action in row]
        sent = [sum(durations.exchange(*part) for part in parts) for parts in rows]
        alone = [
            durations.joint(parts) - sum(durations.of(*part) for part in parts) + n
            for parts, n in zip(rows, sent)
        ]
        back = [i for i, parts in enumerate(rows) if any(op in (Op.B, Op.BW) for op, _ in parts)]
        ahead = [i for i, parts in enumerate(rows) if any(op is Op.F for op, _ in parts)]
        between = slice(back[0], ahead[-1] + 1) if back and ahead else slice(0)
        steady = Fraction(sum(sent[between]), durations.scale)
        exposed = Fraction(sum(alone[between]), durations.scale)
        total, every = (Fraction(sum(x), durations.scale) for x in (sent, alone))
        return cls(total, every, cls(steady, exposed))


def _hidden(ranks: Sequence[Exchange]) -> Fraction | None:
    total = sum((one.total for one in ranks), Fraction(0))
    return 1 - sum(one.exposed for one in ranks) / total if total else None


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
        peak_activation: the same in whole microbatches: sets, each of its size, divided by the
            chunks per rank.
        transfers: of offloaded sets; None if none are.
        exchange: per rank, time of communication between experts, and as much of it as no
            computation goes on beside (``Exchange``).
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
    exchange: list[Exchange] = field(default_factory=list, compare=False)

    @property
    def hidden_exchange(self) -> Fraction | None:
        """Share of all ranks' communication between experts that is hidden; None without any."""
        return _hidden(self.exchange)

    @property
    def hidden_steady(self) -> Fraction | None:
        """The same between every rank's first backward and last forward pass."""
        return _hidden([one.steady for one in self.exchange if one.steady is not None])

    @property
    def peak_vocabulary(self) -> list[Fraction]:
        """Per rank, the most microbatches between S's start and T's end (``peak_held``)."""
        costs, whole = self.schedule.unit_costs()
        sizes = [unit.size for unit in costs]
        return [Fraction(held, whole) for held in peak_held(self.schedule.ranks, sizes)]

    @property
    def peak_host_activation(self) -> list[Fraction]:
        """Most sets on the host of each rank, in microbatches."""
        if self.transfers is None:
            return [Fraction(0)] * self.schedule.pp
        return replace(self.schedule, ranks=self.transfers.ranks).peak_host_activation()

    def memory_curve(self, rank: int) -> list[tuple[int, Fraction | int]]:
        """Steps (time in 1/scale, resident sets from then on) of one rank, times increasing; a
        unit's set counts as its share of a whole microbatch's."""
        if not any(self.peak_sets):
            return [(0, 0)]
        if not self.schedule.has_units:
            return [*curve(self._steps(rank))]
        whole = self.schedule.unit_costs()[1]
        return [(time, Fraction(held, whole)) for time, held in curve(self._steps(rank))]

    def _steps(self, rank: int) -> Iterable[tuple[int, int]]:
        passes = iter(zip(self.start[rank], self.end[rank]))
        moments = iter(() if self.transfers is None else self.transfers.moments[rank])
        row = (self.schedule if self.transfers is None else self.transfers).ranks[rank]
        costs = self.schedule.unit_costs()[0]
        for action in row:
            start, end = next(passes) if action.is_compute else (next(moments),) * 2
            for part in action.parts:
                change = step(part, costs)
                if change:
                    yield (start if change > 0 else end), change


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run ``schedule`` as early as its order and its data dependencies allow.

    A rank runs one pass at a time in the given order. F of stage s waits for F of stage s-1,
    B (or BW) for its own F and the B of stage s+1, W for its B; a dependency on another rank adds
    one hop. A joint action waits for the inputs of both its passes; how long it takes, see
    ``Durations.joint``. Linear in the number of actions.

    Communication actions are ignored, as if each message had a way of its own.

    Offloaded sets travel beside the passes. A rank's computation reaches its offload actions when
    the pass before them has ended; a copy can start when it does, and when its link is free (see
    ``Link``). RELEASE waits for the end of its OFFLOAD's copy, B for that of its RELOAD's.

    Args:
        schedule: lowered or not; assumed complete (see ``check``).
        costs: default ``schedule.costs``.

    Raises:
        ScheduleError: the order cannot progress, or holds an action twice.
        ValueError: per-stage costs for another number of stages.
    """
    compute = schedule.compute()
    durations = (schedule.costs if costs is None else costs).durations(schedule.placement)
    replay = Replay(schedule, durations, costs)
    durations = replay.durations
    done, copies = replay.run()
    start, end = _times(replay, done)
    transfers = None
    if replay.link is not None:
        alone = makespan_of(_without_copies(schedule), costs)
        stall = Fraction(_last(end), durations.scale) - alone
        transfers = _transfers(replay, done, copies, stall)
    last = _last(end)
    span = max((e[-1] - s[0] for s, e in zip(start, end) if s), default=0)
    work = sum(e - s for ss, ee in zip(start, end) for s, e in zip(ss, ee))
    sets = schedule.peak_sets()
    return Simulation(
        schedule=compute,
        start=start,
        end=end,
        scale=durations.scale,
        makespan=Fraction(last, durations.scale),
        bubble=1 - Fraction(work, compute.pp * last) if last else Fraction(0),
        span_bubble=1 - Fraction(work, compute.pp * span) if span else Fraction(0),
        peak_sets=sets,
        peak_activation=schedule.peak_activation(),
        transfers=transfers,
        exchange=[Exchange.of(row, durations) for row in compute.ranks]
        if durations.exchange_forward
        else [],
    )


_Times = list[list[int]]


class Replay:
    """A schedule ready for the event loop, once or many times.

    Args:
        schedule: as for ``simulate``.
        durations: of the passes and hops.
        costs: whose shares the units take; None: the schedule's.

    Attributes:
        plain: its compute actions, and its offload actions if it has a link for them.
        durations: the same in other units if copies need finer ones.
        program: slots and lanes.
        rows: nodes of the actions of ``plain``.

    Raises:
        ScheduleError: a RELEASE without its OFFLOAD, or sets that travel without a link.
        ValueError: the link is for another number of ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        durations: Durations,
        costs: Costs | None = None,
    ) -> None:
        if schedule.has_pairs:
            schedule.require_whole("an order with passes in pairs")
        self._link_times: LinkTimes | None = None
        self.link: Link | None = None
        if schedule.has_offload:
            if schedule.link is None:
                raise ScheduleError("the schedule offloads sets, but does not say how they travel")
            self.link = schedule.link
            self._link_times = schedule.link.times(schedule.placement, durations)
            durations = self._link_times.durations
        self.durations = durations
        self.plain = schedule.compute() if self.link is None else schedule.unlowered()
        found = (part.microbatch for row in self.plain.ranks for a in row for part in a.parts)
        most = 1 + max(found, default=0)
        units = None
        if schedule.slices or (costs or schedule.costs).units is not None:
            units, whole = schedule.unit_costs(costs)
            # Passes are products of their durations and the units' shares.
            self.durations = durations = durations.of_units(whole)
        self.program = Program(schedule.placement, durations, most, schedule.vocabulary, units)
        self.rows: list[Row] = []
        for rank, row in enumerate(self.plain.ranks):
            try:
                nodes = self.program.row if self.link is None else self.program.row_with_copies
                self.rows.append(nodes(row))
            except ValueError as error:
                raise ScheduleError(f"rank {rank}: {error}") from None

    def run(self) -> tuple[Run, list[list[Copy]]]:
        """What the event loop comes to, and the copies of every rank.

        Raises:
            ScheduleError: as ``simulate``.
        """
        plain, program = self.plain, self.program
        copies, slots = None, program.pass_slots
        if self.link is not None:
            assert self._link_times is not None
            copies, slots = Copies(self._link_times, program), program.slots
        try:
            done = run([*self.rows, *program.collectives()], slots, copies=copies)
        except RepeatedError as error:
            rank, position = error.args
            what = f"rank {rank}: {plain.ranks[rank][position]} repeats a pass that has already run"
            raise ScheduleError(f"{what}\n{grid.around(plain.ranks, rank, position)}") from None
        if any(position < len(row) for position, row in zip(done.at, self.rows)):
            raise _cannot_progress(plain, program, done)
        asked = [] if copies is None else copies.done
        return done, [sorted(row, key=lambda copy: copy.start) for row in asked]

    def makespan(self) -> int:
        """The end of the last pass.

        Raises:
            ScheduleError: as ``simulate``.
        """
        return _last(_times(self, self.run()[0])[1])


def makespan_of(schedule: Schedule, costs: Costs | None = None) -> Fraction:
    """Only the makespan of ``simulate``, in units of the costs.

    Raises:
        ScheduleError, ValueError: as ``simulate``.
    """
    durations = (schedule.costs if costs is None else costs).durations(schedule.placement)
    replay = Replay(schedule, durations, costs)
    return Fraction(replay.makespan(), replay.durations.scale)


def run_times(schedule: Schedule, durations: Durations) -> tuple[_Times, _Times]:
    """Start and end of every compute action of a schedule without offload, rank by rank.

    Raises:
        ScheduleError: as ``simulate``.
    """
    replay = Replay(schedule, durations)
    return _times(replay, replay.run()[0])


def _times(replay: Replay, done: Run) -> tuple[_Times, _Times]:
    """Start and end of every compute action, rank by rank."""
    start: _Times = []
    end: _Times = []
    for row, nodes in zip(replay.plain.ranks, replay.rows):
        passes = [node for action, node in zip(row, nodes) if action.is_compute]
        end.append([_at(done, node) for node in passes])
        start.append([at - node[0].took for at, node in zip(end[-1], passes)])
    return start, end


def _transfers(replay: Replay, done: Run, copies: list[list[Copy]], stall: Fraction) -> Transfers:
    assert replay.link is not None
    ranks, units = replay.plain.ranks, replay.plain.units
    if replay.plain.slices:
        copies = [[copy.of(units[copy.action.microbatch]) for copy in row] for row in copies]
    moments = [
        [_at(done, node) for action, node in zip(row, nodes) if not action.is_compute]
        for row, nodes in zip(ranks, replay.rows)
    ]
    return Transfers(replay.link, copies, moments, ranks, peak_host_sets(ranks), stall)


def _without_copies(schedule: Schedule) -> Schedule:
    return schedule.with_ranks([[a for a in row if not a.is_copy] for row in schedule.ranks])


def _at(done: Run, node: Node) -> int:
    lane, j = node
    return done.ends[lane.gives[0] + j]


def _last(end: _Times) -> int:
    return max((row[-1] for row in end if row), default=0)


def _cannot_progress(schedule: Schedule, program: Program, done: Run) -> ScheduleError:
    """Names what every rank waits for, first of all the ranks that wait for each other."""
    positions = done.at
    pipeline = program.placement, program.durations, program.vocabulary
    reasons: list[str] = []
    owners: list[int | None] = []
    for row, at in zip(schedule.ranks, positions):
        if at == len(row):
            reasons.append("done")
            owners.append(None)
            continue
        action = row[at]
        needs = next(
            Action(kind, stage, j)
            for op, own, j in action.parts
            for kind, stage, _ in sources(op, own, *pipeline)
            if done.ends[program.slot(KIND[kind], stage, j)] < 0
        )
        owner = schedule.placement.rank_of(needs.stage)
        whole = needs._replace(op=Op.BW)
        if needs.op is Op.B and any(whole in a.parts for a in schedule.ranks[owner]):
            needs = whole
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
