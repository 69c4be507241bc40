"""Streams of one device: what each executes when, as text, SVG and Chrome trace.

For a call of an MoE layer: compute, the network, and copies to and from the host, in the forward
and in the backward pass. The look is that of schedules (``svg``, ``text``, ``trace``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .chart import Bar, Part, Row, Swatch
from .drawing import Drawing
from .palette import IDLE, theme_style
from .svg import NUMBERS, PLOT, Layout, axis, draw_rows, legend
from .text import row_of
from .timeline import decimal
from .trace import UNIT_US, named, spanning

_COLUMNS = 120  # of the text where there is no terminal
_FONT = 11.0
_ROW, _GAP = 26.0, 4.0

# Colours by the first letter of a span's name, as far as they have a meaning of their own.
_COLORS = {"C": "#2e6bb0", "S": "#c96a12", "R": "#d9a054", "D": "#7a5aa6", "H": "#b39ddb"}
_OTHER = "#8a97a5"


class Span(NamedTuple):
    """One operation, from ``start`` to ``end``; ``name`` is a letter and a chunk's number."""

    name: str
    meaning: str
    start: float
    end: float


class Lane(NamedTuple):
    """One stream's operations by start time."""

    name: str
    spans: tuple[Span, ...]


class Pass(NamedTuple):
    """One direction: its streams, and when its result is there."""

    label: str
    lanes: tuple[Lane, ...]
    makespan: float

    @property
    def end(self) -> float:
        """Of the last operation: copies to the host may outlast the result."""
        ends = (span.end for lane in self.lanes for span in lane.spans)
        return max(ends, default=self.makespan)


class Streams(NamedTuple):
    """A picture.

    Attributes:
        passes: below each other, on one time scale.
        unit: of times; "" where costs have none.
    """

    title: str
    passes: tuple[Pass, ...]
    unit: str = ""

    @property
    def span(self) -> float:
        """The longest pass."""
        return max((one.end for one in self.passes), default=0.0) or 1.0

    def text(self, one: Pass) -> str:
        """A pass in words."""
        unit = f" {self.unit}" if self.unit else ""
        return f"{one.label}: {decimal(one.makespan)}{unit}"

    def meanings(self) -> dict[str, str]:
        """First letter of names -> meaning, of what is drawn."""
        spans = (s for one in self.passes for lane in one.lanes for s in lane.spans)
        return {span.name[0]: span.meaning for span in spans}


def render_text(streams: Streams, width: int = 0) -> str:
    """Plain ASCII with a final newline; an operation too short for a column is left out.

    Args:
        width: columns of the terminal; 0: ``120``.
    """
    margin = max(len(lane.name) for one in streams.passes for lane in one.lanes) + 1
    columns = max((width or _COLUMNS) - margin - 2, 20)
    scale = columns / streams.span
    lines = [streams.title]
    for one in streams.passes:
        lines += ["", streams.text(one)]
        for lane in one.lanes:
            row = row_of(lane.spans, scale, columns, lambda s, wide: s.name.ljust(wide, "-")[:wide])
            lines.append(f"{lane.name.ljust(margin)}|{row}|")
    known = [f"{letter} {meaning}" for letter, meaning in streams.meanings().items()]
    return "\n".join([*lines, "", "; ".join([*known, "dots: idle"])]) + "\n"


def render_svg(streams: Streams) -> str:
    """One self-contained SVG."""
    left = 92.0
    layout = Layout(1.0, PLOT, left, 24.0, _ROW, 0.0, _GAP, _FONT, streams.span, 1)
    out = Drawing()
    out.text(left, 24, streams.title, 14, weight="bold")
    meanings = streams.meanings().items()
    swatches = [Swatch([f"{letter}0"], f"{letter} {meaning}") for letter, meaning in meanings]
    y = legend(out, layout, swatches, 38.0)[1] + 26
    for one in streams.passes:
        out.text(left, y + 12, streams.text(one), 12, weight="bold")
        rows = [Row(lane.name, list(map(_bar, lane.spans)), [], one.end) for lane in one.lanes]
        y = draw_rows(out, layout, rows, y + 20) + 6
    y = axis(out, layout, streams.unit, y) + 12
    fills = "".join(f".{letter}0{{fill:{_COLORS.get(letter, _OTHER)}}}" for letter, _ in meanings)
    style = f"{NUMBERS}.idle{{fill:{IDLE}}}{fills}{theme_style('auto')}"
    return out.document(streams.title, layout.width, y, style)


def _bar(span: Span) -> Bar:
    part = Part(span.name[0], label=span.name)
    return Bar(f"{span.name}, {span.meaning}", span.start, span.end, (part,))


def to_trace(streams: Streams) -> dict[str, Any]:
    """A JSON object of trace events: a process for each pass, a track for each stream."""
    events: list[dict[str, Any]] = []
    for pid, one in enumerate(streams.passes):
        events.append(named("process_name", one.label, pid, 0))
        for tid, lane in enumerate(one.lanes):
            events.append(named("thread_name", lane.name, pid, tid))
            events += [
                spanning(span.name, span.meaning, (pid, tid), span.start, span.end)
                for span in lane.spans
            ]
    about = {"title": streams.title, "unit": streams.unit, "unit_us": UNIT_US}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
