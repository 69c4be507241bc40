"""Checker: proves that a schedule computes every pass once and cannot deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from .. import grid
from ..actions import Action, AnyAction, Op, Operation
from ..costs import Costs
from ..effects import MESSAGES, given, inputs, passes
from ..schedule import Schedule, ScheduleError
from ..simulate import Simulation, Transfers, simulate
from ..units import Unit, place_in_lane
from .check_vocabulary import check_collectives, check_passes


@dataclass(frozen=True)
class CheckReport:
    """Memory of a valid schedule.

    Attributes:
        peak_sets: per rank, the most activation sets resident at once (see ``simulate``).
        peak_activation: the same in whole microbatches.
        peak_host_sets: per rank, the most sets with a copy on the host at once; empty if the
            schedule offloads none.
        offloaded_sets: how many sets are offloaded, per rank; empty if none are.
    """

    peak_sets: list[int]
    peak_activation: list[Fraction]
    peak_host_sets: list[int] = field(default_factory=list)
    offloaded_sets: list[int] = field(default_factory=list)


def check(schedule: Schedule, *, forward_only: bool = False) -> CheckReport:
    """Verify that ``schedule`` can be executed and leaves nothing out.

    Checked: every F, and B and W or one BW, exactly once and on the rank of its stage; F, B and W
    of each chunk, and a rank's vocabulary passes, in microbatch order (slices: F rising, B and W
    falling); W after its B; the data
    dependencies can be met in this order. For a lowered schedule also: exactly the transfers
    needed, on the right ranks, each SEND after its producer, each RECV before its consumer,
    messages between one ordered pair of ranks sent and received in the same order, and an execution
    in which every SEND blocks until the peer stands at the matching RECV finishes. With offload
    also: every OFFLOAD has its RELEASE, PREPARE and RELOAD, between its F and its B and in this
    order, and in simulated time no copy starts before what it needs, or meets another of its rank
    in its direction. With a sharded vocabulary also: see ``check_passes`` and
    ``check_collectives``.

    Args:
        schedule: lowered or not.
        forward_only: F actions only, with a sharded vocabulary E and S too, as in evaluation.

    Raises:
        ScheduleError: the first fault found; the text says what, where and which rule, then
            prints the ranks x positions grid around it.
    """
    where = _collect(schedule)
    _check_complete(schedule, where, forward_only)
    check_passes(schedule, where)
    _check_chunk_order(schedule)
    _check_weight_after_backward(schedule, where)
    _check_offload(schedule, where)
    simulate(schedule, Costs(units=schedule.costs.units))
    if schedule.is_lowered:
        _check_transfers(schedule, where)
        _check_message_order(schedule)
        check_collectives(schedule, where)
        _check_rendezvous(schedule)
    sets, peaks = schedule.peak_sets(), schedule.peak_activation()
    if not schedule.has_offload:
        return CheckReport(sets, peaks)
    transfers = _check_copies(simulate(schedule))
    moved = [sum(a.op is Op.OFFLOAD for a in passes(row)) for row in schedule.ranks]
    return CheckReport(sets, peaks, transfers.peak_host_sets, moved)


_Where = dict[Action, tuple[int, int]]  # action -> (rank, position)


def _collect(schedule: Schedule) -> _Where:
    """Where every action stands; each is known, once there, in range and on its stage's rank."""
    if len(schedule.ranks) != schedule.pp:
        raise ScheduleError(f"{len(schedule.ranks)} action lists for pp={schedule.pp} ranks")
    placement = schedule.placement
    where: _Where = {}
    for rank, position, action in schedule.actions():
        if not 0 <= action.stage < placement.num_stages:
            last = placement.num_stages - 1
            text = f"{action} names stage {action.stage}, but stages go from 0 to {last}"
            raise schedule.fault(rank, position, text)
        if not 0 <= action.microbatch < len(schedule.units):
            last = schedule.units[-1]
            text = f"{action} names microbatch {action.microbatch}, but they go from 0 to {last}"
            raise schedule.fault(rank, position, text)
        owner = placement.rank_of(action.stage)
        if owner != rank:
            text = f"{action} is on the wrong rank: stage {action.stage} lies on rank {owner}"
            raise schedule.fault(rank, position, text)
        if action in where:
            text = f"{action} appears twice, first at position {where[action][1]}"
            raise schedule.fault(rank, position, text)
        where[action] = rank, position
    return where


def _check_complete(schedule: Schedule, where: _Where, forward_only: bool) -> None:
    for rank, row in enumerate(schedule.placement.stages):
        for stage in row:
            for microbatch in schedule.units:
                f, b, w, bw = (Action(op, stage, microbatch) for op in (Op.F, Op.B, Op.W, Op.BW))
                if f not in where:
                    raise _missing(schedule, rank, f)
                if forward_only:
                    for action in (b, w, bw):
                        if action in where:
                            text = (
                                f"{action} in a forward-only schedule, which holds no backward pass"
                            )
                            raise schedule.fault(*where[action], text)
                elif bw in where:
                    for action in (b, w):
                        if action in where:
                            text = f"{action} repeats work of {bw}: give B and W, or one BW"
                            raise schedule.fault(*where[action], text)
                elif b not in where:
                    raise _missing(schedule, rank, b)
                elif (w in where) != _has_w(schedule, microbatch):
                    if w not in where:
                        raise _missing(schedule, rank, w)
                    text = f"{w} repeats the W of all slices, which is named after the first one"
                    raise schedule.fault(*where[w], text)


def _has_w(schedule: Schedule, unit: int) -> bool:
    """Of joined W's, the first slice of each microbatch has one."""
    return not (schedule.joined and isinstance(unit, Unit) and unit.slice)


def _missing(schedule: Schedule, rank: int, action: Action) -> ScheduleError:
    """Points at the place where the previous microbatch of the same kind stands."""
    rule = {
        Op.F: "every stage needs F of every microbatch",
        Op.B: "every stage needs B, or BW, of every microbatch",
        Op.W: "every B needs its W",
    }[Op(action.op)]
    row = schedule.ranks[rank]
    same = [
        (i, part.microbatch)
        for i, a in enumerate(row)
        for part in a.parts
        if part.stage == action.stage and part.op in (action.op, Op.BW)
    ]
    own = place_in_lane(action.op, action.microbatch)
    before = [i for i, microbatch in same if place_in_lane(action.op, microbatch) < own]
    position = before[-1] + 1 if before else (same[0][0] if same else len(row))
    return schedule.fault(rank, position, f"{action} is missing; {rule} exactly once")


def _check_chunk_order(schedule: Schedule) -> None:
    """Gradients accumulate in microbatch order, and transfers match in order, only if each
    chunk's passes come in microbatch order. BW counts as a B and as a W. Slices of a microbatch
    rise in F, which needs the keys of those before, and fall in B and W: B needs the gradients
    that the next slice leaves on its keys."""
    last: dict[tuple[str, int], Action] = {}
    for rank, position, action in schedule.actions():
        if action.is_compute:
            for kind in action.op.value:
                before = last.get((kind, action.stage))
                own = place_in_lane(action.op, action.microbatch)
                if before is not None and place_in_lane(action.op, before.microbatch) > own:
                    text = (
                        f"{action} comes after {before}; the {kind} passes of one chunk must run "
                        f"in microbatch order"
                    )
                    if schedule.slices:
                        falls = "the last slice of each first" if kind != "F" else "slices in order"
                        text += f", {falls}"
                    raise schedule.fault(rank, position, text)
                last[kind, action.stage] = action


def _check_weight_after_backward(schedule: Schedule, where: _Where) -> None:
    for rank, position, action in schedule.actions():
        if action.op is Op.W:
            b = Action(Op.B, action.stage, action.microbatch)
            if where[b][1] > position:
                text = f"{action} stands before {b}; W must come after the B of its microbatch"
                raise schedule.fault(rank, position, text)


def _check_transfers(schedule: Schedule, where: _Where) -> None:
    """Every input from another rank has its SEND and RECV, in place; nothing else is sent."""
    placement, needed = schedule.placement, set()
    made = {result: at for action, at in where.items() for result in given(action)}
    for consumer, (rank, position) in where.items():
        for kind, stage in inputs(consumer.op, consumer.stage, placement.num_stages):
            if placement.rank_of(stage) == rank:
                continue
            j = consumer.microbatch
            send, receive = MESSAGES[kind]
            needed |= {Action(send, stage, j), Action(receive, consumer.stage, j)}
            source = made[Action(kind, stage, j)]
            _check_behind(schedule, where, Action(send, stage, j), source)
            arrival = where.get(Action(receive, consumer.stage, j))
            if arrival is None:
                text = f"{Action(receive, consumer.stage, j)} is missing; {consumer} needs it"
                raise schedule.fault(rank, position, text)
            if arrival[1] > position:
                text = f"{Action(receive, consumer.stage, j)} stands after {consumer}"
                raise schedule.fault(*arrival, f"{text}; a RECV must come before its consumer")
    for rank, position, action in schedule.actions():
        if action.is_message and isinstance(action.op, Op) and action not in needed:
            text = f"{action} is not needed: no pass on another rank is at its other end"
            raise schedule.fault(rank, position, text)


def _check_behind(schedule: Schedule, where: _Where, send: Action, source: tuple[int, int]) -> None:
    rank, position = source
    producer = schedule.ranks[rank][position]
    if send not in where:
        text = f"{send} is missing; another rank needs what {producer} produces"
        raise schedule.fault(rank, position, text)
    if where[send][1] < position:
        text = f"{send} stands before {producer}; a SEND must come after its producer"
        raise schedule.fault(*where[send], text)


_STEPS = (Op.OFFLOAD, Op.RELEASE, Op.PREPARE, Op.RELOAD)


def _check_offload(schedule: Schedule, where: _Where) -> None:
    """F, OFFLOAD, RELEASE, PREPARE, RELOAD, B: all of them or F and B only, in this order."""
    for rank, position, action in schedule.actions():
        if not action.is_copy:
            continue
        if schedule.link is None:
            text = f"{action} needs to know how sets travel; the schedule lacks it"
            raise schedule.fault(rank, position, f'{text} ("offload" in a file)')
        _, stage, j = action
        backward = Op.BW if Action(Op.BW, stage, j) in where else Op.B
        before = Action(Op.F, stage, j)
        for op in (*_STEPS, backward):
            step = Action(op, stage, j)
            if step not in where:
                text = f"{step} is missing; an offloaded set needs"
                steps = "OFFLOAD, RELEASE, PREPARE, RELOAD between its F and its B"
                raise schedule.fault(rank, position, f"{text} {steps}")
            if where[step][1] < where[before][1]:
                text = f"{step} stands before {before}; a set's order is F, OFFLOAD, RELEASE,"
                raise schedule.fault(*where[step], f"{text} PREPARE, RELOAD, B")
            before = step


def _check_copies(run: Simulation) -> Transfers:
    """In simulated time: no two copies of a rank one way at once, none too early or too late."""
    transfers = run.transfers
    assert transfers is not None
    until: dict[tuple[int, Operation], tuple[int, Action]] = {}
    copies = [(copy, rank) for rank, row in enumerate(transfers.copies) for copy in row]
    begin: dict[Action, int] = {}
    for row, starts, ends in zip(run.schedule.ranks, run.start, run.end):
        for action, start, end in zip(row, starts, ends):
            for result in given(action):
                begin[result] = end if result.op is Op.F else start
    home: dict[tuple[int, int], int] = {}  # end of the set's OFFLOAD
    for copy, rank in sorted(copies, key=lambda c: (c[0].start, c[0].end)):
        op, stage, j = copy.action
        busy, other = until.get((rank, op), (0, copy.action))
        if busy > copy.start:
            raise ScheduleError(
                f"rank {rank}: the copies of {copy.action} and {other} overlap in time"
            )
        until[rank, op] = copy.end, copy.action
        if op is Op.OFFLOAD:
            home[stage, j] = copy.end
            good = begin[Action(Op.F, stage, j)] <= copy.start
        else:
            needed = begin.get(Action(Op.B, stage, j), 0)
            good = home[stage, j] <= copy.start and copy.end <= needed
        if not good:
            raise ScheduleError(f"rank {rank}: the copy of {copy.action} is not where it can be")
    return transfers


def _check_message_order(schedule: Schedule) -> None:
    """Point-to-point calls between two ranks match by order, not by content."""
    sent: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in schedule.actions():
        if action.op.is_send:
            sent.setdefault((rank, action.peer(schedule.placement)[0]), []).append(action)
    taken = dict.fromkeys(sent, 0)
    for rank, position, action in schedule.actions():
        if action.op.is_receive:
            source, send = action.peer(schedule.placement)
            actual = sent[source, rank][taken[source, rank]]
            taken[source, rank] += 1
            if actual != send:
                text = (
                    f"{action} would receive {actual} of rank {source}; messages from rank "
                    f"{source} to rank {rank} match in the order they are sent"
                )
                raise schedule.fault(rank, position, text)


def _check_rendezvous(schedule: Schedule) -> None:
    """Execute with blocking transfers only: both ends must stand at the pair at once."""
    at = [0] * schedule.pp
    awake = list(range(schedule.pp - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row = schedule.ranks[rank]
        while at[rank] < len(row) and not _meets(row[at[rank]]):
            at[rank] += 1
        if at[rank] == len(row):
            continue
        if row[at[rank]].parts[0].op.is_collective:
            if all(_is_at(other, i, row[at[rank]]) for other, i in zip(schedule.ranks, at)):
                at = [position + 1 for position in at]
                awake = list(range(schedule.pp))
            continue
        peer, matching = _peer(schedule, row[at[rank]])
        if at[peer] < len(schedule.ranks[peer]) and schedule.ranks[peer][at[peer]] == matching:
            at[rank] += 1
            at[peer] += 1
            awake += [peer, rank]
    if all(position == len(row) for position, row in zip(at, schedule.ranks)):
        return
    raise _deadlock(schedule, at)


def _meets(action: AnyAction) -> bool:
    return action.is_message or action.parts[0].op.is_collective


def _is_at(row: Sequence[AnyAction], position: int, action: AnyAction) -> bool:
    """True if a rank stands at this collective, whatever stage it names there."""
    if position == len(row):
        return False
    (op, _, microbatch), here = action.parts[0], row[position].parts[0]
    return (here.op, here.microbatch) == (op, microbatch)


def _peer(schedule: Schedule, message: AnyAction) -> tuple[int, Action]:
    assert isinstance(message, Action)
    return message.peer(schedule.placement)


def _deadlock(schedule: Schedule, at: list[int]) -> ScheduleError:
    reasons: list[str] = []
    peers: list[int | None] = []
    for row, position in zip(schedule.ranks, at):
        if position == len(row):
            reasons.append("done")
            peers.append(None)
        elif row[position].parts[0].op.is_collective:
            late = [not _is_at(r, i, row[position]) for r, i in zip(schedule.ranks, at)]
            peers.append(late.index(True))
            reasons.append(f"{row[position]} waits for rank {peers[-1]} to come to it")
        else:
            peer, matching = _peer(schedule, row[position])
            reasons.append(f"{row[position]} waits for {matching} of rank {peer}")
            peers.append(peer)
    circle = grid.wait_cycle(peers)
    first = circle[0]
    return ScheduleError(
        f"deadlock: rank {first}, position {at[first]}: {reasons[first]}; ranks "
        f"{', '.join(map(str, circle))} wait for each other in a circle, if every SEND blocks "
        f"until its RECV is reached\n{grid.stuck(schedule.ranks, at, reasons)}"
    )
