"""The timeline as one self-contained SVG: ranks as rows, memory curves under it.

The look is the papers': blue F, warm B, green W with microbatch numbers; a rank's first chunk is
dark with white numbers, its last one light with dark numbers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..schedule.actions import Op, Operation
from ..schedule.vocabulary import VocabularyOp
from .timeline import Box, Timeline, decimal, reference_peak

_DARK: dict[Operation, str] = {
    Op.F: "#2e6bb0",
    Op.B: "#c96a12",
    Op.W: "#2a8c67",
    Op.BW: "#b5483a",
    VocabularyOp.S: "#7a3b8f",
    VocabularyOp.T: "#a8577e",
    VocabularyOp.E: "#5b6770",
    VocabularyOp.G: "#8a949c",
}
_MEANING: dict[Operation, str] = {
    Op.F: "F forward",
    Op.B: "B input gradient",
    Op.W: "W weight gradient",
    Op.BW: "BW whole backward",
    VocabularyOp.S: "S logits of the rank's vocabulary",
    VocabularyOp.T: "T their weight gradient",
    VocabularyOp.E: "E embeddings",
    VocabularyOp.G: "G their gradient",
}
_COPIES = {Op.OFFLOAD: "#7a5aa6", Op.RELOAD: "#b39ddb"}
_INK, _SOFT, _IDLE, _GRID = "#1f2933", "#64707d", "#e9ecf0", "#cfd5dc"
_AREA, _LINE, _MEASURED = "#c3d0e2", "#3d5a80", "#b5483a"
_DIGIT = 0.6  # width of a digit in em, on the safe side
_READABLE = 6.5  # smallest font size that is still drawn, px
_WIDTHS = (960, 2400)  # of the plot, px
_TOOLTIPS = 4000  # boxes up to which each one carries its name and times


@dataclass(frozen=True)
class _Layout:
    """Sizes in px. ``unit`` grows with the picture so that text survives scaling to a page."""

    unit: float
    plot: float
    left: float
    right: float
    row: float
    strip: float
    gap: float
    font: float  # of the microbatch numbers; 0: none are drawn
    span: float  # time at the right edge of the plot

    @property
    def width(self) -> float:
        return self.left + self.plot + self.right

    def x(self, time: float) -> float:
        return self.left + self.plot * time / self.span


def render(timeline: Timeline, measured: Timeline | None = None) -> str:
    """SVG text of one run, or of a planned and a measured run on one time axis.

    Args:
        timeline: drawn first; with ``measured`` it is stretched to the measured unit and total
            compute time (``Timeline.scaled_to``).
        measured: drawn under it, its memory as a line over the first one's area.
    """
    runs = [timeline] if measured is None else [timeline.scaled_to(measured), measured]
    layout = _layout(runs)
    u = layout.unit
    parts: list[str] = []
    y = _header(parts, layout, runs, 30 * u)
    for run in runs:
        if len(runs) > 1:
            label = f"{run.label}: {_result(run)}"
            parts.append(_text(layout.left, y + 12 * u, label, 12 * u, weight="bold"))
            y += 20 * u
        y = _rows(parts, layout, run, y) + 6 * u
    y = _axis(parts, layout, runs[0].unit, y - 4 * u) + 30 * u
    y = _memory(parts, layout, runs, y) + 14 * u
    return _document(parts, layout.width, y, runs)


def _layout(runs: Sequence[Timeline]) -> _Layout:
    pp = runs[0].schedule.pp
    digits = len(str(max(1, runs[0].schedule.microbatches - 1)))
    span = max(run.makespan for run in runs) or 1.0
    widths = sorted(box.end - box.start for run in runs for row in run.boxes for box in row)
    # Not the narrowest box of all: one cheap stage must not decide how everything looks.
    narrow = (widths[len(widths) // 10] if widths else 0.0) or span
    wanted = (digits * _DIGIT * 8.5 + 2) * span / narrow
    plot = min(max(wanted, _WIDTHS[0]), _WIDTHS[1])
    font = (narrow / span * plot - 1.5) / (digits * _DIGIT)
    if font < _READABLE:
        plot, font = min(plot, 1600.0), 0.0
    unit = plot / _WIDTHS[0]
    crowded = min(1.0, 12 / pp)
    roomy = 1.35 if pp <= 4 else 1.0
    row = max(9.0, 24 * unit**0.5 * crowded)
    return _Layout(
        unit=unit,
        plot=plot,
        left=66 * unit,
        right=56 * unit,
        row=row,
        strip=max(10.0, 22 * unit**0.75 * crowded * roomy),
        gap=max(1.5, row * 0.14),
        font=min(font, row * 0.52, 13 * unit**0.5),
        span=span,
    )


def _header(parts: list[str], layout: _Layout, runs: Sequence[Timeline], y: float) -> float:
    u, schedule = layout.unit, runs[0].schedule
    facts = f"p = {schedule.pp}   m = {schedule.microbatches}"
    if schedule.chunks > 1:
        facts = f"p = {schedule.pp}   v = {schedule.chunks}   m = {schedule.microbatches}"
    if len(runs) == 1:
        facts += f"   ·   {_result(runs[0])}"
    name = html.escape(schedule.name)
    parts.append(
        f'<text x="{_n(layout.left)}" y="{_n(y)}" font-size="{_n(15 * u)}" xml:space="preserve">'
        f'<tspan font-weight="bold">{name}</tspan>   {html.escape(facts)}</text>'
    )
    y += 14 * u
    x = layout.left
    used = {part.op for run in runs for row in run.boxes for b in row for part in b.action.parts}
    for op in (op for op in _DARK if op in used):
        for chunk in range(schedule.chunks):
            parts.append(_rect(x, y, 14 * u, 12 * u, f"{op.value}{chunk}"))
            x += 15 * u
        parts.append(_text(x + 4 * u, y + 10 * u, _MEANING[op], 11 * u, fill=_SOFT))
        x += (26 + 6.1 * len(_MEANING[op])) * u
    if any(run.copies for run in runs):
        for op, text in ((Op.OFFLOAD, "to host"), (Op.RELOAD, "to device")):
            parts.append(_rect(x, y, 14 * u, 12 * u, op.value))
            parts.append(_text(x + 19 * u, y + 10 * u, text, 11 * u, fill=_SOFT))
            x += (41 + 6.1 * len(text)) * u
    parts.append(_rect(x, y, 14 * u, 12 * u, "idle"))
    parts.append(_text(x + 19 * u, y + 10 * u, "idle", 11 * u, fill=_SOFT))
    if schedule.chunks > 1:
        note = f"dark to light: chunk 0 to {schedule.chunks - 1}"
        parts.append(_text(x + 58 * u, y + 10 * u, note, 11 * u, fill=_SOFT))
    parts.append(
        _text(layout.width - 12 * u, y + 10 * u, "idle", 11 * u, "end", _SOFT, kind="right")
    )
    return y + 20 * u


def _result(run: Timeline) -> str:
    return run.facts or (
        f"makespan {run.makespan_text}   bubble {decimal(100 * run.bubble, 1)} %   "
        f"peak activation {decimal(max(run.peak_activation))} "
        f"(1F1B {reference_peak(run.schedule)})"
    )


def _rows(parts: list[str], layout: _Layout, run: Timeline, y: float) -> float:
    """One row a rank: the grey of idle time, the boxes on it, the idle share at the right."""
    u, chunk_of = layout.unit, run.schedule.placement.chunk_of
    tooltips = sum(len(row) for row in run.boxes) <= _TOOLTIPS
    label = min(12 * u, layout.row * 0.8)
    for rank, row in enumerate(run.boxes):
        base = y + layout.row / 2 + label * 0.36
        parts.append(_text(layout.left - 8 * u, base, f"rank {rank}", label, "end", kind="left"))
        parts.append(
            _rect(layout.left, y, layout.x(run.makespan) - layout.left, layout.row, "idle row")
        )
        numbers = []
        for box in row:
            # The passes of a joint action share its time, one above the other.
            height = layout.row / len(box.action.parts)
            for i, part in enumerate(box.action.parts):
                chunk, top = chunk_of(part.stage), y + i * height
                kind = f"{part.op.value}{chunk}"
                parts.append(_box(layout, box, top, height, kind, tooltips))
                numbers.append(_number(layout, box, top, height, part.microbatch, chunk))
        if any(numbers):
            parts.append(f'<g class="n" font-size="{_n(layout.font)}">{"".join(numbers)}</g>')
        busy = math.fsum(box.end - box.start for box in row)
        idle = f"{decimal(100 * (1 - busy / run.makespan), 1)} %" if run.makespan else ""
        size = label * 0.92
        parts.append(_text(layout.width - 12 * u, base, idle, size, "end", _SOFT, kind="right"))
        y += layout.row
        if run.copies:
            parts += _copies(layout, run.copies[rank], y, tooltips)
            y += layout.row * _LANES
        y += layout.gap
    return y


_LANES = 0.4  # height of both lanes of copies, in rows


def _copies(layout: _Layout, boxes: Sequence[Box], y: float, tooltips: bool) -> Iterator[str]:
    """To the host on the upper lane, to the device on the lower one."""
    height = layout.row * _LANES / 2
    for action, start, end in boxes:
        op = action.parts[0].op
        lane = int(op is Op.RELOAD)
        title = f"{action}: {decimal(start)} to {decimal(end)}" if tooltips else ""
        width = max(layout.plot * (end - start) / layout.span, 0.3)
        kind = f"copy {op.value}"
        yield _rect(layout.x(start), y + lane * height, width, height, kind, title)


def _box(layout: _Layout, box: Box, y: float, height: float, kind: str, tooltip: bool) -> str:
    x, width = layout.x(box.start), layout.plot * (box.end - box.start) / layout.span
    # A hairline between boxes, left out where it would eat the box.
    inset = 0.5 if width > 4 else 0.0
    title = f"{box.action}: {decimal(box.start)} to {decimal(box.end)}" if tooltip else ""
    return _rect(x + inset, y, max(width - 2 * inset, 0.3), height, f"box {kind}", title)


def _number(layout: _Layout, box: Box, y: float, height: float, microbatch: int, chunk: int) -> str:
    text = str(microbatch)
    room = layout.plot * (box.end - box.start) / layout.span
    if not layout.font or len(text) * _DIGIT * layout.font > room or layout.font > height:
        return ""
    x = layout.x((box.start + box.end) / 2)
    kind = ' class="l"' if chunk else ""
    return f'<text x="{_n(x)}" y="{_n(y + height / 2 + layout.font * 0.36)}"{kind}>{text}</text>'


def _axis(parts: list[str], layout: _Layout, unit: str, y: float) -> float:
    u = layout.unit
    step = _tick(layout.span)
    lines = [f"M{_n(layout.left)} {_n(y)}h{_n(layout.plot)}"]
    for i in range(math.floor(layout.span / step + 1e-9) + 1):
        x = layout.x(i * step)
        lines.append(f"M{_n(x)} {_n(y)}v{_n(4 * u)}")
        parts.append(_text(x, y + 16 * u, decimal(i * step), 11 * u, "middle", _SOFT, kind="tick"))
    parts.append(
        f'<path class="axis" d="{"".join(lines)}" fill="none" stroke="{_SOFT}" '
        f'stroke-width="{_n(u)}"/>'
    )
    name = unit or "time"
    parts.append(_text(layout.width - 12 * u, y + 16 * u, name, 11 * u, "end", _SOFT, kind="right"))
    return y + 16 * u


def _tick(span: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that gives about ten ticks."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    return next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= 12)


def _memory(parts: list[str], layout: _Layout, runs: Sequence[Timeline], y: float) -> float:
    """A strip a rank: resident activations over time, and the peak of 1F1B as a dashed line."""
    u, schedule = layout.unit, runs[0].schedule
    reference = reference_peak(schedule)
    note = "activations resident on each rank, in microbatches   ·   dashed: peak of 1F1B, "
    note += str(reference)
    if len(runs) > 1:
        note += "   ·   area planned, line measured"
    parts.append(_text(layout.left, y, note, 12 * u, fill=_INK))
    parts.append(_text(layout.width - 12 * u, y, "peak", 11 * u, "end", _SOFT, kind="right"))
    y += 9 * u
    top = max(reference, *(peak for run in runs for peak in run.peak_activation)) * 1.12
    scale = layout.strip / (top * schedule.chunks)  # px a set
    label = min(12 * u, layout.strip * 0.8)
    for rank in range(schedule.pp):
        base = y + layout.strip / 2 + label * 0.36
        floor = y + layout.strip
        parts.append(_text(layout.left - 8 * u, base, f"rank {rank}", label, "end", kind="left"))
        parts.append(_rect(layout.left, y, layout.plot, layout.strip, "strip"))
        steps = _steps(layout, runs[0], rank, floor, scale)
        edge = layout.x(runs[0].makespan)
        area = f"M{_n(layout.left)} {_n(floor)}{steps}H{_n(edge)}V{_n(floor)}Z"
        parts.append(f'<path class="area" d="{area}"/>')
        for run in runs[1:]:
            line = f"M{_n(layout.left)} {_n(floor)}{_steps(layout, run, rank, floor, scale)}"
            parts.append(f'<path class="line" d="{line}"/>')
        dashed = _n(floor - reference * schedule.chunks * scale)
        parts.append(f'<path class="peak" d="M{_n(layout.left)} {dashed}h{_n(layout.plot)}"/>')
        peak = decimal(runs[-1].peak_activation[rank])
        parts.append(
            _text(layout.width - 12 * u, base, peak, label, "end", weight="bold", kind="right")
        )
        y = floor + layout.gap
    return y


def _steps(layout: _Layout, run: Timeline, rank: int, floor: float, scale: float) -> str:
    return "".join(
        f"H{_n(layout.x(time))}V{_n(floor - sets * scale)}" for time, sets in run.memory[rank]
    )


def _document(parts: list[str], width: float, height: float, runs: Sequence[Timeline]) -> str:
    schedule = runs[0].schedule
    u = width / _WIDTHS[0]
    fills = [
        f".{op.value}{chunk}{{fill:{_shade(color, chunk, schedule.chunks)}}}"
        for op, color in _DARK.items()
        for chunk in range(schedule.chunks)
    ]
    copies = ""
    if any(run.copies for run in runs):
        copies = "".join(f".{op.value}{{fill:{color}}}" for op, color in _COPIES.items())
    style = (
        "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif}"
        ".n text{fill:#fff;text-anchor:middle}.n .l{fill:#16202a}"
        f"{copies}.idle{{fill:{_IDLE}}}.strip{{fill:#f5f6f8}}.area{{fill:{_AREA};stroke:{_LINE};"
        f"stroke-width:{_n(0.8 * u)}}}.line{{fill:none;stroke:{_MEASURED};"
        f"stroke-width:{_n(1.2 * u)}}}.peak{{fill:none;stroke:{_INK};stroke-width:{_n(0.9 * u)};"
        f"stroke-dasharray:{_n(5 * u)} {_n(3 * u)}}}" + "".join(fills)
    )
    name = f"{schedule.name}, pp {schedule.pp}, microbatches {schedule.microbatches}"
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} fill="{_INK}" role="img">',
            f"<title>Pipeline timeline of {html.escape(name)}</title>",
            f"<style>{style}</style>",
            f'<rect width="{_n(width)}" height="{_n(height)}" fill="#ffffff"/>',
            *(part for part in parts if part),
            "</svg>\n",
        ]
    )


def _shade(color: str, chunk: int, chunks: int) -> str:
    """``color`` for chunk 0, mixed with white up to the last chunk."""
    white = 0.0 if chunks == 1 else 0.42 + 0.26 * chunk / (chunks - 1) if chunk else 0.0
    rgb = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in rgb)


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    body = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f"{body}><title>{html.escape(title)}</title></rect>" if title else f"{body}/>"


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    anchor: str = "start",
    fill: str = _INK,
    weight: str = "",
    kind: str = "",
) -> str:
    style = f' font-weight="{weight}"' if weight else ""
    if kind:  # what the page's script moves when it zooms
        style += f' class="{kind}"'
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}" '
        f'fill="{fill}"{style} xml:space="preserve">{html.escape(text)}</text>'
    )


def _n(value: float) -> str:
    """A coordinate, short: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
