"""Timeline in plain ASCII: one row per rank, readable over SSH and in a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from .._terminal import colored, paint
from ..schedule.vocabulary import E, G
from .chart import Bar, Part, Row, rows_of
from .timeline import Timeline, decimal, reference_peak, slices_text

_BLOCKS = 4  # a picture is wrapped into at most so many blocks of rows
_IDLE = "."
_COLORS = {"F": "34", "B": "33", "W": "32", _IDLE: "2"}  # as in pictures; idle time is faint
_COLUMNS = 200_000  # no longer than that, even if one pass is very much shorter than the rest


def render(timeline: Timeline, width: int = 0) -> str:
    """Text of one run, with a final newline.

    A pass is drawn as its operation and microbatch, as wide as it is long (``F0``, ``BW3---``);
    passes of odd chunks are in lower case; dots are idle time. A line under a rank's shows its
    copies: > to the host, < back to the device, x both at once. Where that needs more than four
    wrapped blocks, one letter per pass without its number; where that still does, the rest is left
    out and a note says so.

    Args:
        width: columns of the terminal, in colour if it has any; 0: no wrapping.
    """
    timeline = _without_embeddings(timeline)
    name = f"rank {timeline.schedule.pp - 1} "
    margin = len(max(name, "  copies ", key=len) if timeline.copies else name) + 1
    room = max(width - margin - 1, 20) if width else 0
    chart = _Chart(rows_of(timeline), timeline.makespan)
    (rows, kinds), note = _numbered(chart), "F0 = forward of microbatch 0"
    if room and len(rows[0]) > _BLOCKS * room:
        rows, kinds = _letters(chart)
        note = "one letter a pass (B for BW too), without its microbatch"
    if not (width and colored()):
        kinds = [" " * len(row) for row in rows]
    lines = _header(timeline, note)
    total = len(rows[0])
    copies = _copies(chart, total)
    step = room or max(total, 1)
    shown = min(total, _BLOCKS * step) if room else total
    per_column = timeline.makespan / total if total else 0.0
    for first in range(0, shown, step):
        if shown > step:
            last = min(first + step, shown)
            lines.append(f"time {decimal(first * per_column)} to {decimal(last * per_column)}")
        for rank, row in enumerate(rows):
            part = slice(first, first + step)
            name = f"rank {rank}".ljust(margin - 1)
            lines.append(f"{name}|{_painted(row[part], kinds[rank][part])}|")
            if copies:
                lines.append(
                    f"{'  copies'.ljust(margin - 1)}|{copies[rank][first : first + step]}|"
                )
        lines.append("")
    if shown < total:
        lines += [
            f"time {decimal(shown * per_column)} to {decimal(timeline.makespan)} is not shown: "
            f"{total - shown} of {total} columns; --width 0 prints all, an SVG shows all",
            "",
        ]
    return "\n".join(lines[:-1] if lines[-1] == "" else lines) + "\n"


def _without_embeddings(timeline: Timeline) -> Timeline:
    """Without passes so short that all others would have to be very wide."""
    boxes = [[b for b in row if b.action.parts[0].op not in (E, G)] for row in timeline.boxes]
    return replace(timeline, boxes=tuple(map(tuple, boxes)))


def _header(timeline: Timeline, note: str) -> list[str]:
    schedule = timeline.schedule
    peaks = " ".join(decimal(peak) for peak in timeline.peak_activation)
    case = "; lower case = odd chunks" if schedule.chunks > 1 else ""
    if timeline.copies:
        case += "; > to the host, < back"
    result = f"makespan {timeline.makespan_text}, bubble {decimal(100 * timeline.bubble, 1)} %"
    order = [] if schedule.arrangement is None else [f"microbatches {schedule.arrangement}"]
    return [
        f"{schedule.name} ({timeline.label}): pp {schedule.pp}, chunks {schedule.chunks}, "
        f"microbatches {schedule.microbatches}{slices_text(schedule, ', slices ')}, {result}",
        f"peak activation per rank, in microbatches (1F1B: {reference_peak(schedule)}): {peaks}",
        *order,
        f"{note}{case}; dots = idle",
        "",
    ]


def _numbered(chart: _Chart) -> tuple[list[str], list[str]]:
    """Every pass with its microbatch; the shortest pass relative to its text sets the scale."""
    bars = [bar for row in chart.rows for bar in row.bars if bar.end > bar.start]
    scale = max(((len(_text(bar)) + 1) / (bar.end - bar.start) for bar in bars), default=0.0)

    def fill(bar: Bar, columns: int) -> str:
        return _text(bar).ljust(columns - 1, "-")[:columns].ljust(columns)

    return chart.drawn(scale, fill), chart.drawn(scale, _kind)


def _letters(chart: _Chart) -> tuple[list[str], list[str]]:
    """One column for the shortest pass, filled with the operation's letter (BW: B)."""
    lengths = [bar.end - bar.start for row in chart.rows for bar in row.bars]
    shortest = min((length for length in lengths if length > 0), default=0.0)

    def fill(bar: Bar, columns: int) -> str:
        letters = [_cased(part, part.op[0]) for part in bar.parts]
        return ("".join(letters) * columns)[:columns]

    scale = 1 / shortest if shortest else 0.0
    return chart.drawn(scale, fill), chart.drawn(scale, _kind)


def _kind(bar: Bar, columns: int) -> str:
    """The operation's letter in every column of a pass, of joint ones in turn."""
    letters = "".join(part.op[0] for part in bar.parts)
    return (letters * columns)[:columns]


def _painted(text: str, kinds: str) -> str:
    """``text`` in the colours of its columns' operations; blank: as it is."""
    out, at = "", 0
    for kind, columns in groupby(kinds):
        part = text[at : (at := at + len(list(columns)))]
        out += paint(part, _COLORS[kind]) if kind in _COLORS else part
    return out


def _copies(chart: _Chart, total: int) -> list[str]:
    """One row a rank of its copies; one shorter than a column has one all the same."""
    rows = []
    scale = total / chart.makespan if chart.makespan else 0.0
    for copies in (row.lanes for row in chart.rows if row.lanes):
        row = [" "] * total
        for mark, lane in zip("><", copies):
            for bar in lane:
                first = min(round(bar.start * scale), total - 1)
                for column in range(first, max(round(bar.end * scale), first + 1)):
                    row[column] = mark if row[column] in (" ", mark) else "x"
        rows.append("".join(row))
    return rows


def _text(bar: Bar) -> str:
    return "+".join(_cased(part, f"{part.op}{part.label}") for part in bar.parts)


def _cased(part: Part, text: str) -> str:
    """In lower case if its chunk is odd."""
    return text.lower() if part.chunk % 2 else text


class _Chart(NamedTuple):
    rows: list[Row]
    makespan: float

    def drawn(self, scale: float, fill: Callable[[Bar, int], str]) -> list[str]:
        """Rows of equal length, ``scale`` columns a unit of time, less where that is too long."""
        scale = min(scale, _COLUMNS / self.makespan) if self.makespan else 0.0
        total = round(self.makespan * scale)
        return [row_of(row.bars, scale, total, fill) for row in self.rows]


def row_of(boxes: Sequence[Any], scale: float, total: int, fill: Callable[[Any, int], str]) -> str:
    """``total`` columns with boxes by start time, ``scale`` columns a unit of time.

    Args:
        boxes: of any picture, with ``start`` and ``end``.
        fill: the text of a box, for so many columns.
    """
    row = ""
    for box in boxes:
        row += _IDLE * (round(box.start * scale) - len(row))
        row += fill(box, max(round(box.end * scale) - len(row), 0))
    return row.ljust(total, _IDLE)
