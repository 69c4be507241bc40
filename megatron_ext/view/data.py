"""A timeline as plain data, for the viewer of the HTML pages (web/viewer.js)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .palette import COPIES, COPY_MEANING, MEANING, shades
from .timeline import Box, Timeline, decimal, reference_peak, result_text, sizes_of


def view_data(runs: Sequence[Timeline]) -> dict[str, Any]:
    """What the viewer draws: ``runs`` one above the other, and the operations' names."""
    return {
        "runs": [run_data(run) for run in runs],
        "meanings": {op.value: text for op, text in MEANING.items()}
        | {op.value: text for op, text in COPY_MEANING.items()},
    }


def run_data(run: Timeline) -> dict[str, Any]:
    """One run. Times are in its unit, memory in microbatches.

    ``rows[rank]`` has a list a pass: start, end, and for each of its parts (one, or the passes of a
    joint action) operation, stage and microbatch; of slices the unit, whose name is in ``units``.
    ``memory[rank]`` has steps (time, microbatches from then on), ``copies[rank]`` start, end and
    operation of each copy.
    """
    schedule = run.schedule
    facts = f"{', '.join(sizes_of(schedule))}: {result_text(run)}"
    ops = run.ops
    moved = [op for op in COPIES if any(run.copies)]
    colors = {op.value: shades(op, schedule.chunks) for op in ops}
    return {
        "title": schedule.name if run.label == "planned" else f"{schedule.name}, {run.label}",
        "label": run.label,
        "facts": facts,
        "brief": f"m = {schedule.microbatches}: bubble {decimal(100 * run.bubble, 1)} %, "
        f"peak {decimal(max(run.peak_activation))} (1F1B {reference_peak(schedule)})",
        "microbatches": schedule.microbatches,
        "units": [str(unit) for unit in schedule.units] if schedule.slices else [],
        "pp": schedule.pp,
        "chunks": schedule.chunks,
        "unit": run.unit,
        "makespan": _short(run.makespan),
        "reference": reference_peak(schedule),
        "peaks": [_short(peak) for peak in run.peak_activation],
        "idle": [round(share, 4) for share in run.idle],
        "ops": [op.value for op in (*ops, *moved)],
        "colors": colors | {op.value: [COPIES[op]] for op in moved},
        "chunk": [schedule.placement.chunk_of(s) for s in range(schedule.placement.num_stages)],
        "rows": [[_pass(box) for box in row] for row in run.boxes],
        "memory": [
            [[_short(time), _short(sets / schedule.chunks)] for time, sets in row]
            for row in run.memory
        ],
        "copies": [
            [[_short(b.start), _short(b.end), b.action.parts[0].op.value] for b in row]
            for row in run.copies or ((),) * schedule.pp
        ],
    }


def _pass(box: Box) -> list[Any]:
    parts = [x for p in box.action.parts for x in (p.op.value, p.stage, p.microbatch)]
    return [_short(box.start), _short(box.end), *parts]


def _short(value: float) -> float:
    """Five significant decimals are more than a picture shows."""
    text = decimal(value, 5)
    return float(text) if "." in text else int(text)
