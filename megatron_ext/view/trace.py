"""The timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank: a track of passes for each run, one of copies to and from the host for each
direction if sets are offloaded, a counter of resident activation sets, and
arrows from a pass to the one on another rank that uses its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..schedule.actions import Action
from ..schedule.effects import users
from .palette import COPY_MEANING
from .timeline import Timeline, results_of


def to_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """A JSON object of trace events.

    Args:
        timelines: runs of one schedule, e.g. planned and measured, one track each.
    """
    events: list[dict[str, Any]] = []
    for rank in range(timelines[0].schedule.pp):
        events.append(named("process_name", f"rank {rank}", rank, 0))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        )
    for track, timeline in enumerate(timelines):
        for rank in range(timeline.schedule.pp):
            events.append(named("thread_name", timeline.label, rank, track))
            events += _passes(timeline, rank, track)
            events += _counter(timeline, rank)
            events += _copies(timeline, rank, _COPIES + 2 * track)
        events += _arrows(timeline, track)
    schedule = timelines[0].schedule
    about = {"schedule": schedule.name, "pp": schedule.pp, "microbatches": schedule.microbatches}
    if schedule.slices:
        about["slices"] = schedule.slices_json
    if any(not timeline.unit for timeline in timelines):
        about["unit_us"] = UNIT_US
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


UNIT_US = 1000.0  # of a millisecond, which a unit of the costs is drawn as, too
_COPIES = 100  # tracks of copies stand below those of passes


def _copies(timeline: Timeline, rank: int, track: int) -> Iterator[dict[str, Any]]:
    boxes = timeline.copies[rank] if timeline.copies else ()
    for lane, (op, text) in enumerate(COPY_MEANING.items()):
        mine = [box for box in boxes if box.action.parts[0].op is op]
        if mine:
            yield named("thread_name", f"{text}, {timeline.label}", rank, track + lane)
        for action, start, end in mine:
            (part,) = action.parts
            event = spanning(str(action), op.value, (rank, track + lane), start, end)
            yield {**event, "args": {"stage": part.stage, "microbatch": part.microbatch}}


def spanning(
    name: str, kind: str, place: tuple[int, int], start: float, end: float
) -> dict[str, Any]:
    """Something that lasts, on the track ``place``."""
    times = {"ts": start * UNIT_US, "dur": (end - start) * UNIT_US}
    return {"ph": "X", "name": name, "cat": kind, "pid": place[0], "tid": place[1], **times}


def named(kind: str, text: str, pid: int, tid: int) -> dict[str, Any]:
    """The name of a process or a track."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}


def _passes(timeline: Timeline, rank: int, track: int) -> Iterator[dict[str, Any]]:
    chunk_of = timeline.schedule.placement.chunk_of
    for action, start, end in timeline.boxes[rank]:
        passes = [
            {"stage": stage, "chunk": chunk_of(stage), "microbatch": microbatch}
            for _, stage, microbatch in action.parts
        ]
        kind = "+".join(part.op.value for part in action.parts)
        event = spanning(f"PP:{action}", kind, (rank, track), start, end)
        both = dict(zip(("forward", "backward"), passes))
        yield {**event, "args": passes[0] if len(passes) == 1 else both}


def _counter(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    for time, sets in timeline.memory[rank]:
        yield {
            "ph": "C",
            "name": f"activation sets, {timeline.label}",
            "pid": rank,
            "ts": time * UNIT_US,
            "args": {"sets": sets},
        }


def _arrows(timeline: Timeline, track: int) -> Iterator[dict[str, Any]]:
    """Flow events from the end of a pass to the start of the pass on another rank that needs it."""
    made, number = results_of(timeline), 0
    for (kind, stage, unit), (rank, box) in made.items():
        for user in users(kind, stage, timeline.schedule.placement.num_stages):
            other, target = made.get(Action(*user, unit), (rank, box))
            if other == rank:
                continue
            number += 1
            flow = {"name": str(box.action), "cat": "transfer", "id": f"{track}.{number}"}
            begin, end = box.end * UNIT_US, target.start * UNIT_US
            yield {"ph": "s", **flow, "pid": rank, "tid": track, "ts": begin}
            yield {"ph": "f", "bp": "e", **flow, "pid": other, "tid": track, "ts": end}
