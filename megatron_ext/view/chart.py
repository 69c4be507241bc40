"""What every picture shows: rows of bars on one time axis of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..schedule.actions import Op
from ..schedule.units import Unit
from .palette import COPIES
from .timeline import Box, Timeline, decimal


class Part(NamedTuple):
    """What a bar stands for: an operation, the rank's chunk, and what is written beside it."""

    op: str
    chunk: int = 0
    label: str = ""


class Bar(NamedTuple):
    """From ``start`` to ``end``; several parts share its time, one above the other."""

    what: str
    start: float
    end: float
    parts: tuple[Part, ...]

    @property
    def title(self) -> str:
        """What is shown under the pointer."""
        return f"{self.what}: {decimal(self.start)} to {decimal(self.end)}"


class Row(NamedTuple):
    """One rank or stream.

    Attributes:
        name: at the left.
        bars: by start time.
        lanes: below: copies to the host, and to the device; none where nothing is offloaded.
        end: until then what no bar covers is idle.
        note: at the right.
    """

    name: str
    bars: Sequence[Bar]
    lanes: Sequence[Sequence[Bar]]
    end: float
    note: str = ""


class Swatch(NamedTuple):
    """An entry of a legend: colours, as CSS classes, and what they mean."""

    kinds: Sequence[str]
    meaning: str


def rows_of(run: Timeline) -> list[Row]:
    """A row a rank."""
    schedule = run.schedule

    def bars(boxes: Iterable[Box]) -> list[Bar]:
        found = []
        for action, start, end in boxes:
            parts = []
            for op, stage, unit in action.parts:
                whole = schedule.joined and op is Op.W and isinstance(unit, Unit)
                label = str(unit.microbatch if whole else unit)  # type: ignore[attr-defined]
                parts.append(Part(op.value, schedule.placement.chunk_of(stage), label))
            found.append(Bar(str(action), start, end, tuple(parts)))
        return found

    rows = []
    for rank, (boxes, idle) in enumerate(zip(run.boxes, run.idle)):
        copies = bars(run.copies[rank]) if run.copies else []
        lanes = [[bar for bar in copies if bar.parts[0].op == op.value] for op in COPIES]
        note = f"{decimal(100 * idle, 1)} %" if run.makespan else ""
        mine = lanes if run.copies else []
        rows.append(Row(f"rank {rank}", bars(boxes), mine, run.makespan, note))
    return rows
