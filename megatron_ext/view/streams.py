"""Streams of one device: what each executes when, as text, SVG and Chrome trace.

For a call of an MoE layer: compute, the network, and copies to and from the host, in the forward
and in the backward pass. The look is that of schedules (``svg``, ``text``, ``trace``).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from .drawing import Drawing, short
from .palette import IDLE, SOFT, theme_style
from .svg import _WIDTHS, _axis, _Layout, bar
from .text import row_of
from .timeline import decimal
from .trace import named, spanning

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
    plot, left = float(_WIDTHS[0]), 92.0
    layout = _Layout(1.0, plot, left, 24.0, _ROW, 0.0, _GAP, _FONT, streams.span, 1)
    out = Drawing()
    out.text(left, 24, streams.title, 14, weight="bold")
    y = _legend(out, layout, streams.meanings(), 38.0)
    for one in streams.passes:
        out.text(left, y + 12, streams.text(one), 12, weight="bold")
        y += 20
        for lane in one.lanes:
            out.text(left - 8, y + _ROW / 2 + 4, lane.name, 12, "end")
            out.rect(left, y, layout.x(one.end) - left, _ROW, "idle")
            _spans(out, layout, lane.spans, y)
            y += _ROW + _GAP
        y += 6
    y = _axis(out, layout, streams.unit, y) + 12
    fills = "".join(
        f".k{letter}{{fill:{_COLORS.get(letter, _OTHER)}}}" for letter in streams.meanings()
    )
    style = f".n{{fill:#fff;text-anchor:middle}}.idle{{fill:{IDLE}}}{fills}{theme_style('auto')}"
    return out.document(streams.title, layout.width, y, style)


def _legend(out: Drawing, layout: _Layout, meanings: dict[str, str], y: float) -> float:
    x = layout.left
    for letter, meaning in meanings.items():
        text = f"{letter} {meaning}"
        wide = 28 + 6.0 * len(text)
        if x + wide > layout.left + layout.plot:
            x, y = layout.left, y + 17
        out.rect(x, y, 14, 12, f"k{letter}")
        out.text(x + 19, y + 10, text, 11, fill=SOFT)
        x += wide
    return y + 26


def _spans(out: Drawing, layout: _Layout, spans: Sequence[Span], y: float) -> None:
    for span in spans:
        title = f"{span.name}, {span.meaning}: {decimal(span.start)} to {decimal(span.end)}"
        bar(out, layout, (span.start, span.end), y, _ROW, f"k{span.name[0]}", title)
        wide = layout.plot * (span.end - span.start) / layout.span
        if wide > 0.7 * _FONT * len(span.name):
            x = short(layout.x(span.start) + wide / 2)
            place = {"x": x, "y": short(y + _ROW / 2 + 4), "font_size": short(_FONT)}
            out.add("text", html.escape(span.name), class_="n", **place)


def to_trace(streams: Streams, unit_us: float = 1000.0) -> dict[str, Any]:
    """A JSON object of trace events: a process for each pass, a track for each stream.

    Args:
        unit_us: microseconds that one unit of the times is drawn as.
    """
    events: list[dict[str, Any]] = []
    for pid, one in enumerate(streams.passes):
        events.append(named("process_name", one.label, pid, 0))
        for tid, lane in enumerate(one.lanes):
            events.append(named("thread_name", lane.name, pid, tid))
            events += [
                spanning(span.name, span.meaning, (pid, tid), span.start, span.end, unit_us)
                for span in lane.spans
            ]
    about = {"title": streams.title, "unit": streams.unit, "unit_us": unit_us}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
