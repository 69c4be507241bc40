"""When every operation of a chunked MoE layer runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .costs import BACKWARD, Kind, Times
from .layout import ACCESS, Buffer, Layout, Op, Stream


class Event(NamedTuple):
    """When an operation ran, in milliseconds from the layer's start."""

    op: Op
    start: float
    end: float


class Simulation(NamedTuple):
    """The simulated run of one layer in one direction.

    Attributes:
        events: by stream, then in order.
        makespan_ms: last end of any operation, copies included.
    """

    events: list[Event]
    makespan_ms: float


class Stuck(ValueError):
    """The order and the slots wait for each other."""


def simulate(layout: Layout, direction: str, times: Sequence[Times]) -> Simulation:
    """Run a layer as early as its streams' orders, its data and its slots allow.

    Streams are in order and run one operation at a time. An operation starts when what it reads
    has been written, and when the slots that it writes have been read by all that read their
    former content, copies to the host included. With offload or a restore, loads run ahead as far
    as slots allow (MPipeMoE, section III-D).

    Args:
        layout: chunks, strategy, order and slots.
        direction: ``forward`` or ``backward``.
        times: one mapping a chunk; kinds that do not run may be missing.

    Raises:
        Stuck: an operation waits for one that is behind it, e.g. ``dispatch-first`` with fewer
            slots than chunks.
        ValueError: not one mapping a chunk, or another direction.
    """
    if len(times) != layout.chunks:
        raise ValueError(f"times of {len(times)} chunks for a layer of {layout.chunks}")
    streams = layout.streams(direction)
    run = _run(streams, _waits(layout, direction, streams), times)
    events = [Event(op, *run[op]) for ops in streams.values() for op in ops]
    return Simulation(events, max(event.end for event in events))


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
