"""Timeline: one run of a schedule, simulated or measured, as every picture takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .._input import shown
from ..schedule.actions import Action, AnyAction, Op, Operation, parse
from ..schedule.effects import DEVICE, FREES, curve, given, step
from ..schedule.schedule import Schedule
from ..schedule.simulate import Simulation
from ..schedule.units import UnitCosts
from .palette import MEANING


class Box(NamedTuple):
    """One action on one rank, from ``start`` to ``end`` in the timeline's unit."""

    action: AnyAction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of every compute action of every rank.

    Attributes:
        label: ``planned`` or ``measured``.
        schedule: whose run this is (name, placement, microbatches).
        boxes: ``boxes[rank]``, compute actions by start time; the first start of all is 0.
        memory: ``memory[rank]``, steps (time, resident activation sets from then on).
        unit: what times are in: ``""`` for the units of the costs, ``"ms"`` for measured ones.
        copies: ``copies[rank]``, transfers of offloaded sets (OFFLOAD, RELOAD); empty if none are.
        machine: what a measured run ran on; empty where that is not known.
    """

    label: str
    schedule: Schedule
    boxes: tuple[tuple[Box, ...], ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    unit: str = ""
    machine: str = ""
    copies: tuple[tuple[Box, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks."""
        return max((box.end for row in self.boxes for box in row), default=0.0)

    @property
    def makespan_text(self) -> str:
        """The makespan for people, with its unit."""
        return f"{decimal(self.makespan, 1)} {self.unit}" if self.unit else decimal(self.makespan)

    @property
    def work(self) -> float:
        """Compute time summed over all ranks."""
        return math.fsum(box.end - box.start for row in self.boxes for box in row)

    @property
    def bubble(self) -> float:
        """Mean over ranks of the share of the makespan in which the rank computes nothing."""
        return 1 - self.work / (len(self.boxes) * self.makespan) if self.makespan else 0.0

    @property
    def idle(self) -> list[float]:
        """Share of the makespan in which each rank computes nothing."""
        busy = (math.fsum(box.end - box.start for box in row) for row in self.boxes)
        return [1 - time / self.makespan if self.makespan else 0.0 for time in busy]

    @property
    def ops(self) -> list[Operation]:
        """Operations that run, in the order of legends."""
        used = {part.op for row in self.boxes for box in row for part in box.action.parts}
        return [op for op in MEANING if op in used]

    @property
    def peak_activation(self) -> list[float]:
        """Most resident activations of each rank, in microbatches (sets / chunks)."""
        chunks = self.schedule.chunks
        return [max((sets for _, sets in row), default=0) / chunks for row in self.memory]

    @property
    def longest_label(self) -> int:
        """Characters of the longest one."""
        return max(len(str(unit)) for unit in self.schedule.units)

    def scaled_to(self, other: Timeline) -> Timeline:
        """This run in ``other``'s unit, stretched so that both spend equally long computing.

        On one time axis, whatever differs then is waiting, not a cost in other units.
        """
        factor = other.work / self.work if self.work else 1.0
        boxes, copies = (
            tuple(tuple(Box(a, s * factor, e * factor) for a, s, e in row) for row in rows)
            for rows in (self.boxes, self.copies)
        )
        memory = tuple(tuple((t * factor, sets) for t, sets in row) for row in self.memory)
        return replace(self, boxes=boxes, memory=memory, copies=copies, unit=other.unit)


def planned(simulation: Simulation) -> Timeline:
    """The simulated run; times in the units of the costs."""
    scale = simulation.scale
    rows = zip(simulation.schedule.ranks, simulation.start, simulation.end)
    return Timeline(
        label="planned",
        schedule=simulation.schedule,
        boxes=tuple(
            tuple(Box(action, s / scale, e / scale) for action, s, e in zip(*row)) for row in rows
        ),
        memory=tuple(
            tuple(
                (time / scale, sets if isinstance(sets, int) else float(sets))
                for time, sets in simulation.memory_curve(rank)
            )
            for rank in range(simulation.schedule.pp)
        ),
        copies=tuple(
            tuple(Box(action, s / scale, e / scale) for action, s, e in row)
            for row in (simulation.transfers.copies if simulation.transfers else ())
        ),
    )


def measured(schedule: Schedule, events: Sequence[Sequence[Mapping[str, Any]]]) -> Timeline:
    """A traced run of ``schedule``; times in ms from the first start of all ranks.

    A set that is offloaded leaves and comes back, in the memory, as the pass before its RELEASE or
    PREPARE ends: a trace has no times of these.

    Args:
        events: per rank, ``{"action": "F3.1", "start_us": float, "end_us": float}`` in any order,
            on one clock. Actions that are not compute (sends, offloads) are left out.

    Raises:
        ValueError: not one list a rank, an event lacks a field or ends before it starts, or its
            stage does not lie on that rank.
    """
    if len(events) != schedule.pp:
        raise ValueError(f"{len(events)} event lists for pp={schedule.pp}; give one a rank")
    rows = [_boxes(schedule, rank, row) for rank, row in enumerate(events)]
    origin = min((row[0].start for row in rows if row), default=0.0)
    shifted = tuple(tuple(Box(a, s - origin, e - origin) for a, s, e in row) for row in rows)
    backward = any(p.op in FREES for row in shifted for box in row for p in box.action.parts)
    costs, whole = schedule.unit_costs()
    memory = tuple(
        _memory(row, planned, costs, whole) if backward else ((0.0, 0),)
        for row, planned in zip(shifted, schedule.ranks)
    )
    return Timeline("measured", schedule.compute(), shifted, memory, "ms")


def _boxes(schedule: Schedule, rank: int, events: Sequence[Mapping[str, Any]]) -> list[Box]:
    boxes = []
    units = {str(unit): unit for unit in schedule.units} if schedule.slices else None
    for event in events:
        try:
            action = parse(event["action"], units)
            start, end = float(event["start_us"]) / 1000, float(event["end_us"]) / 1000
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"rank {rank}: bad event {shown(event)} ({error}); expected "
                '{"action": "F3.1", "start_us": 0.0, "end_us": 1.0}'
            ) from None
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ValueError(f"rank {rank}: {action} runs from {start} to {end} ms")
        if not action.is_compute:
            continue
        if any(part.stage not in schedule.placement.stages[rank] for part in action.parts):
            held = ", ".join(str(s) for s in schedule.placement.stages[rank])
            raise ValueError(f"rank {rank}: {action} was traced, but the rank holds stages {held}")
        boxes.append(Box(action, start, end))
    return sorted(boxes, key=lambda box: (box.start, box.end))


def _memory(
    boxes: Sequence[Box],
    planned: Sequence[AnyAction] = (),
    costs: Sequence[UnitCosts] | None = None,
    whole: int = 1,
) -> tuple[tuple[float, float], ...]:
    """Resident sets over time: a set lives from its F's start to its W's (or BW's) end, less the
    time between its RELEASE and PREPARE in the ``planned`` list. ``costs`` have the units' sizes,
    as parts of ``whole``; None: microbatches are not cut."""
    steps: list[tuple[float, int]] = []
    for box in boxes:
        for part in box.action.parts:
            change = step(part, costs)
            if change:
                steps.append((box.start if change > 0 else box.end, change))
    ends = {box.action: box.end for box in boxes}
    last = 0.0
    for action in planned:
        last = ends.get(action, last)
        if action.parts[0].op in (Op.RELEASE, Op.PREPARE):
            steps.append((last, DEVICE[action.parts[0].op]))
    found = curve(sorted(steps))
    return tuple(found) if whole == 1 else tuple((time, held / whole) for time, held in found)


def results_of(run: Timeline) -> dict[Action, tuple[int, Box]]:
    """By result (``effects.given``): the rank and the pass that it is of."""
    return {
        result: (rank, box)
        for rank, row in enumerate(run.boxes)
        for box in row
        for result in given(box.action)
    }


def is_pair(runs: Sequence[Timeline]) -> bool:
    """True for a planned run and its measured one."""
    return len(runs) == 2 and runs[1].label == "measured"


def on_one_axis(runs: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """Runs as they are drawn together: a plan is stretched to the measured run under it."""
    return (runs[0].scaled_to(runs[1]), runs[1]) if is_pair(runs) else tuple(runs)


def names_of(runs: Sequence[Timeline]) -> str:
    """Every schedule once, with its sizes."""
    texts = (
        f"{s.name}, pp {s.pp}, microbatches {s.microbatches}{slices_text(s, ', slices ')}"
        + ("" if s.arrangement is None else f" {s.arrangement}")
        for s in (r.schedule for r in runs)
    )
    return " and ".join(dict.fromkeys(texts))


def sizes_of(schedule: Schedule) -> list[str]:
    """Ranks, chunks if there are several, microbatches, and slices if they are cut."""
    chunks = [f"v = {schedule.chunks}"] if schedule.chunks > 1 else []
    cut = [text for text in (slices_text(schedule, "K = "),) if text]
    return [f"p = {schedule.pp}", *chunks, f"m = {schedule.microbatches}", *cut]


def slices_text(schedule: Schedule, name: str) -> str:
    """How many slices each microbatch has, behind ``name``; empty where none is cut."""
    if not schedule.slices:
        return ""
    least, most = min(schedule.slices), max(schedule.slices)
    return f"{name}{least}" if least == most else f"{name}{least} to {most}"


def reference_peak(schedule: Schedule) -> int:
    """Peak activation of 1F1B for the same p and m, in microbatches: rank 0 holds min(p, m)."""
    return min(schedule.pp, schedule.microbatches)


def result_text(run: Timeline) -> str:
    """Makespan, bubble and peak for people."""
    on = f"   measured on {run.machine}" if run.machine else ""
    return (
        f"makespan {run.makespan_text}   bubble {decimal(100 * run.bubble, 1)} %   "
        f"peak activation {decimal(max(run.peak_activation))} "
        f"(1F1B {reference_peak(run.schedule)}){on}"
    )


def decimal(value: float, digits: int = 3) -> str:
    """``value`` with at most ``digits`` decimals, for people."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
