"""When every operation of a chunked MoE layer runs, and whether a log of one kept its slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .costs import BACKWARD, How, Kind, Times
from .layout import ACCESS, Buffer, Layout, Op
from .slowdown import Slowdown, Stream


class Event(NamedTuple):
    """When an operation ran, in milliseconds from the layer's start."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The simulated run of one layer in one direction.

    Attributes:
        layout, direction: what ran.
        events: by start; ties in the order of streams.
        makespan_ms: last end of any operation, copies included.
        output_ms: end of the last combine, when the next layer could start.
    """

    layout: Layout
    direction: str
    events: tuple[Event, ...]
    makespan_ms: float
    output_ms: float

    def busy_ms(self, stream: Stream) -> float:
        """How long a stream works."""
        return sum(e.end - e.start for e in self.events if ACCESS[e.op.kind].stream is stream)


class Stuck(ValueError):
    """The order and the slots wait for each other."""


class HazardError(ValueError):
    """A log in which an operation reads what is not there, or overwrites what is still read."""


def simulate(
    layout: Layout, direction: str, times: Sequence[Times], slowdown: Slowdown | None = None
) -> Simulation:
    """Run a layer as early as its streams' orders, its data and its slots allow.

    Streams are in order and run one operation at a time. An operation starts when what it reads
    has been written, and when the slots that it writes have been read by all that read their
    former content, copies to the host included. With offload or a restore, loads run ahead as far
    as slots allow (MPipeMoE, section III-D).

    Args:
        layout: chunks, strategy, order and slots.
        direction: ``forward`` or ``backward``.
        times: one mapping a chunk; kinds that do not run may be missing.
        slowdown: what streams lose while others are busy.

    Raises:
        Stuck: an operation waits for one that is behind it, e.g. ``dispatch-first`` with fewer
            slots than chunks.
        ValueError: not one mapping a chunk, or another direction.
    """
    if len(times) != layout.chunks:
        raise ValueError(f"times of {len(times)} chunks for a layer of {layout.chunks}")
    streams = layout.streams(direction)
    waits = _waits(layout, direction, streams)
    if slowdown is None:
        run = _run(streams, waits, times)
    else:
        run = _run_shared(streams, waits, times, slowdown)
    events = sorted((Event(op, *when) for op, when in run.items()), key=lambda event: event.start)
    combine = Kind.GRAD_COMBINE if direction == BACKWARD else Kind.COMBINE
    output = max(event.end for event in events if event.op.kind is combine)
    return Simulation(layout, direction, tuple(events), max(event.end for event in events), output)


_Streams = Mapping[Stream, Sequence[Op]]
_Waits = Mapping[Op, set[Op]]


def _waits(layout: Layout, direction: str, streams: _Streams) -> dict[Op, set[Op]]:
    """What every operation waits for besides its stream."""
    ops = [op for stream in streams.values() for op in stream]
    readers: dict[tuple[Buffer, int], set[Op]] = {}
    writer: dict[tuple[Buffer, int], Op] = {}
    for op in ops:
        for buffer in ACCESS[op.kind].reads:
            readers.setdefault((buffer, op.chunk), set()).add(op)
        for buffer in ACCESS[op.kind].writes:
            writer[buffer, op.chunk] = op
    sequence = layout.sequence(direction)
    place = {chunk: i for i, chunk in enumerate(sequence)}
    waits: dict[Op, set[Op]] = {op: set() for op in ops}
    for op in ops:
        for buffer in ACCESS[op.kind].reads:
            if (buffer, op.chunk) in writer:  # else it is kept from forward
                waits[op].add(writer[buffer, op.chunk])
        for buffer in ACCESS[op.kind].writes:
            former = place[op.chunk] - layout.slots(buffer)
            if former >= 0:
                waits[op] |= readers[buffer, sequence[former]]
    return waits


def _run(streams: _Streams, waits: _Waits, times: Sequence[Times]) -> dict[Op, tuple[float, float]]:
    """Start and end of every operation: each starts at the latest end of what it waits for."""
    done: dict[Op, tuple[float, float]] = {}
    free = dict.fromkeys(streams, 0.0)
    heads = dict.fromkeys(streams, 0)
    moved = True
    while moved:
        moved = False
        for stream, ops in streams.items():
            while heads[stream] < len(ops):
                op = ops[heads[stream]]
                if any(other not in done for other in waits[op]):
                    break
                start = max([free[stream], *(done[other][1] for other in waits[op])])
                free[stream] = start + times[op.chunk][op.kind]
                done[op] = (start, free[stream])
                heads[stream] += 1
                moved = True
    _require_all(streams, heads, done, waits)
    return done


def _run_shared(
    streams: _Streams, waits: _Waits, times: Sequence[Times], slowdown: Slowdown
) -> dict[Op, tuple[float, float]]:
    """As ``_run``; speeds change whenever a stream starts or ends to work."""
    done: dict[Op, tuple[float, float]] = {}
    heads = dict.fromkeys(streams, 0)
    running: dict[Stream, tuple[Op, float, float]] = {}  # operation, start, work left
    now = 0.0
    while True:
        for stream, ops in streams.items():
            if stream not in running and heads[stream] < len(ops):
                op = ops[heads[stream]]
                if all(other in done for other in waits[op]):
                    running[stream] = (op, now, times[op.chunk][op.kind])
                    heads[stream] += 1
        if not running:
            break
        busy = running.keys()
        speed = {stream: slowdown.speed(stream, busy) for stream in running}
        left = {stream: work / speed[stream] for stream, (_, _, work) in running.items()}
        step = min(left.values())
        now += step
        for stream, (op, start, work) in list(running.items()):
            if left[stream] <= step * (1 + 1e-12):  # rounding must not leave a rest
                done[op] = (start, now)
                del running[stream]
            else:
                running[stream] = (op, start, work - step * speed[stream])
    _require_all(streams, heads, done, waits)
    return done


def _require_all(
    streams: _Streams, heads: Mapping[Stream, int], done: Mapping[Op, object], waits: _Waits
) -> None:
    stuck = [ops[heads[stream]] for stream, ops in streams.items() if heads[stream] < len(ops)]
    if stuck:
        text = "; ".join(
            f"{op} waits for {', '.join(sorted(str(x) for x in waits[op] if x not in done))}"
            for op in stuck
            if any(x not in done for x in waits[op])
        )
        raise Stuck(
            f"the order of the all-to-alls and the slots wait for each other: {text}; give the "
            "rings more slots, or use the order alternate"
        )


def check_slots(
    events: Iterable[Event], layout: Layout, direction: str, tolerance_ms: float = 0.0
) -> None:
    """Replay a log, simulated or measured, and find what a runtime must never do.

    Chunk i of a tensor lies in slot i mod its depth. Every read must come after its own chunk's
    write, with no write to that slot in between or meanwhile; and two writes never meet.

    Args:
        events: in any order.
        layout, direction: what was to run.
        tolerance_ms: how much two events may overlap, for clocks that differ.

    Raises:
        HazardError: operations are missing, unknown or there twice; a stream runs two at a time;
            or a slot is read or written as above. Says which, and when.
    """
    log = sorted(events, key=lambda event: (event.start, event.end))
    _check_complete(log, layout, direction)
    last: dict[Stream, Event] = {}
    slots: dict[tuple[Buffer, int], tuple[list[Event], list[Event]]] = {}
    for event in log:
        access = ACCESS[event.op.kind]
        former = last.get(access.stream)
        if former is not None and event.start < former.end - tolerance_ms:
            raise HazardError(
                f"{_when(event)} starts in {access.stream.value} before {_when(former)} has ended"
            )
        last[access.stream] = event
        for buffers, is_write in ((access.reads, False), (access.writes, True)):
            for buffer in buffers:
                slot = (buffer, event.op.chunk % layout.slots(buffer))
                slots.setdefault(slot, ([], []))[is_write].append(event)
    for (buffer, index), (reads, writes) in slots.items():
        where = f"slot {index} of {buffer.value}"
        for one, other in pairwise(writes):
            if other.start < one.end - tolerance_ms:
                raise HazardError(f"{_when(other)} writes {where} while {_when(one)} does")
        if writes or not _kept(buffer, layout):
            for read in reads:
                _check_read(read, writes, where, tolerance_ms)


def _kept(buffer: Buffer, layout: Layout) -> bool:
    """Backward reads it as forward left it."""
    how = {Buffer.INPUT: layout.restore.input, Buffer.MIDDLE: layout.restore.middle}
    return how.get(buffer) is How.KEPT


def _check_read(read: Event, writes: list[Event], where: str, tolerance_ms: float) -> None:
    own = [write for write in writes if write.op.chunk == read.op.chunk]
    if not own or own[0].end > read.start + tolerance_ms:
        raise HazardError(f"{_when(read)} reads {where} before its chunk is there")
    for write in writes:
        if write is own[0] or write.end <= own[0].start + tolerance_ms:
            continue
        if write.start < read.end - tolerance_ms:
            raise HazardError(f"{_when(write)} overwrites {where} before {_when(read)} has read it")


def _check_complete(log: Sequence[Event], layout: Layout, direction: str) -> None:
    expected = {op for ops in layout.streams(direction).values() for op in ops}
    seen: set[Op] = set()
    for event in log:
        if event.op not in expected or event.op in seen or event.end < event.start:
            raise HazardError(f"{_when(event)} is not in the plan, there twice, or ends too early")
        seen.add(event.op)
    if seen != expected:
        missing = sorted(map(str, expected - seen))
        raise HazardError(f"not in the log: {', '.join(missing)}")


def _when(event: Event) -> str:
    return f"{event.op} ({event.start:g} to {event.end:g} ms)"


def lower_bound_ms(layout: Layout, direction: str, times: Sequence[Times]) -> float:
    """No order and no number of slots makes the layer faster than this.

    The all-to-alls' sum; the computation's, after what its first operation waits for and before the
    last combine; the copies'. For equal chunks without restores that is max(sum of all-to-alls,
    t_S + sum of C + t_R).
    """
    streams = layout.streams(direction)
    total = {stream: sum(times[op.chunk][op.kind] for op in ops) for stream, ops in streams.items()}
    comm, comp = streams[Stream.COMM], streams[Stream.COMP]
    first = comm[0]
    lead = times[first.chunk][first.kind]
    if direction == BACKWARD and layout.strategy == "s3":  # fc1 runs again from what comes back
        lead = times[first.chunk][Kind.LOAD_INPUT]
    last = comm[-1]
    assert comp[0].chunk == first.chunk
    assert comp[-1].chunk == last.chunk
    trail = times[last.chunk][last.kind]
    return max(total[Stream.COMM], lead + total[Stream.COMP] + trail, total[Stream.COPY])
