"""The timeline as one self-contained SVG: ranks as rows, memory curves under it.

The look is the papers': blue F, warm B, green W with microbatch numbers; a rank's first chunk is
dark with white numbers, its last one light with dark numbers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .chart import Bar, Part, Row, Swatch, rows_of
from .drawing import Drawing, round_step, short
from .palette import (
    AREA,
    COPIES,
    COPY_MEANING,
    DARK,
    IDLE,
    INK,
    LINE,
    MEANING,
    MEASURED,
    SOFT,
    STRIP,
    shades,
    theme_style,
)
from .timeline import (
    Timeline,
    decimal,
    is_pair,
    names_of,
    on_one_axis,
    reference_peak,
    result_text,
    sizes_of,
)

_DIGIT = 0.6  # width of a digit in em, on the safe side
_READABLE = 6.5  # smallest font size that is still drawn, px
PLOT = 960.0  # width of the plot, px
_WIDEST = 2400
NUMBERS = ".n text{fill:#fff;text-anchor:middle}"  # style of labels
_TOOLTIPS = 4000  # boxes up to which each one carries its name and times


@dataclass(frozen=True)
class Layout:
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
    chunks: int  # most of any run

    @property
    def width(self) -> float:
        return self.left + self.plot + self.right

    def x(self, time: float) -> float:
        return self.left + self.plot * time / self.span


def render(*runs: Timeline, theme: str = "auto") -> str:
    """SVG text of runs on one time axis.

    Args:
        runs: one run; or a planned run and its measured one (the plan is stretched to the measured
            unit and total compute time, ``Timeline.scaled_to``, and its memory is the area under
            the measured line); or runs of any schedules, one above the other, each with the memory
            of its fullest rank.
        theme: ``auto`` follows the reader's dark mode, ``light`` and ``dark`` are fixed.
    """
    stacked = len(runs) > 1 and not is_pair(runs)
    runs = on_one_axis(runs)
    layout = _layout(runs)
    u = layout.unit
    out = Drawing()
    y = _header(out, layout, runs, 30 * u, titled=not stacked)
    for run in runs:
        if len(runs) > 1:
            label = f"{run.schedule.name if stacked else run.label}: {result_text(run)}"
            out.text(layout.left, y + 12 * u, label, 12 * u, weight="bold")
            y += 20 * u
        top = y
        chunks = run.schedule.chunks
        suffix = "" if chunks == layout.chunks else f"of{chunks}"
        y = draw_rows(out, layout, rows_of(run), y, suffix) + 6 * u
        if stacked:
            _saved(out, layout, run, top, y - 6 * u)
            y = _fullest(out, layout, run, y) + 14 * u
    y = axis(out, layout, runs[0].unit, y - 4 * u) + (14 if stacked else 30) * u
    if not stacked:
        y = _memory(out, layout, runs, y) + 14 * u
    return _document(out, layout.width, y, runs, theme)


def _saved(out: Drawing, layout: Layout, run: Timeline, top: float, bottom: float) -> None:
    """Beside a run that ends earlier than the longest one: by how much, if there is room."""
    start, end, u = layout.x(run.makespan), layout.left + layout.plot, layout.unit
    text = f"{decimal(100 * (1 - run.makespan / layout.span), 1)} % less time"
    size = min(14 * u, (end - start) / (len(text) * _DIGIT))
    if size < _READABLE:
        return
    middle = (top + bottom) / 2
    ends = f"M{short(start)} {short(top)}V{short(bottom)}M{short(end)} {short(top)}V{short(bottom)}"
    between = f"M{short(start)} {short(middle + size * 0.5)}H{short(end)}"
    out.parts.append(
        f'<path class="axis" d="{ends}{between}" fill="none" stroke="{SOFT}" '
        f'stroke-width="{short(0.8 * u)}"/>'
    )
    out.text((start + end) / 2, middle, text, size, "middle", weight="bold")


def _fullest(out: Drawing, layout: Layout, run: Timeline, y: float) -> float:
    """A strip of the rank that holds most, and the peak of 1F1B as a dashed line."""
    u, peaks = layout.unit, run.peak_activation
    rank = peaks.index(max(peaks))
    note = "activations of the fullest rank, in microbatches   ·   dashed: peak of 1F1B, "
    note += str(reference_peak(run.schedule))
    out.text(layout.left, y + 8 * u, note, 11 * u, fill=SOFT)
    return _strip(out, layout, [run], rank, y + 14 * u, 1.5 * layout.strip)


def _layout(runs: Sequence[Timeline]) -> Layout:
    pp = max(run.schedule.pp for run in runs)
    digits = max(run.longest_label for run in runs)
    span = max(run.makespan for run in runs) or 1.0
    widths = sorted(box.end - box.start for run in runs for row in run.boxes for box in row)
    # Not the narrowest box of all: one cheap stage must not decide how everything looks.
    narrow = (widths[len(widths) // 10] if widths else 0.0) or span
    wanted = (digits * _DIGIT * 8.5 + 2) * span / narrow
    plot = min(max(wanted, PLOT), _WIDEST)
    font = (narrow / span * plot - 1.5) / (digits * _DIGIT)
    if font < _READABLE:
        plot, font = min(plot, 1600.0), 0.0
    unit = plot / PLOT
    crowded = min(1.0, 12 / pp)
    roomy = 1.35 if pp <= 4 else 1.0
    row = max(9.0, 24 * unit**0.5 * crowded)
    return Layout(
        unit=unit,
        plot=plot,
        left=66 * unit,
        right=56 * unit,
        row=row,
        strip=max(10.0, 22 * unit**0.75 * crowded * roomy),
        gap=max(1.5, row * 0.14),
        font=min(font, row * 0.52, 13 * unit**0.5),
        span=span,
        chunks=max(run.schedule.chunks for run in runs),
    )


def _header(
    out: Drawing, layout: Layout, runs: Sequence[Timeline], y: float, titled: bool
) -> float:
    """Title and legend; without ``titled`` every run has a title of its own."""
    u, schedule = layout.unit, max((run.schedule for run in runs), key=lambda one: one.chunks)
    facts = "   ".join(sizes_of(schedule))
    if len(runs) == 1:
        facts += f"   ·   {result_text(runs[0])}"
    if not titled:
        facts = "   ".join(text for text in sizes_of(schedule) if text[0] != "v")
    name = (
        html.escape(schedule.name)
        if titled
        else " above ".join(html.escape(run.schedule.name) for run in runs)
    )
    place = {"x": short(layout.left), "y": short(y), "font_size": short(15 * u)}
    words = f'<tspan font-weight="bold">{name}</tspan>   {html.escape(facts)}'
    out.add("text", words, **place, **{"xml:space": out.space})
    y += 14 * u
    used = {op for run in runs for op in run.ops}
    swatches = [
        Swatch([f"{op.value}{chunk}" for chunk in range(schedule.chunks)], text)
        for op, text in MEANING.items()
        if op in used
    ]
    if any(run.copies for run in runs):
        swatches += [Swatch([op.value], text) for op, text in COPY_MEANING.items()]
    x, y = legend(out, layout, [*swatches, Swatch(["idle"], "idle")], y)
    if schedule.chunks > 1:
        note = f"dark to light: chunk 0 to {schedule.chunks - 1}"
        out.text(x - 7.4 * u, y + 10 * u, note, 11 * u, fill=SOFT)  # "idle" is a narrow word
    out.text(layout.width - 12 * u, y + 10 * u, "idle", 11 * u, "end", SOFT, kind="right")
    return y + 20 * u


def legend(
    out: Drawing, layout: Layout, swatches: Sequence[Swatch], y: float
) -> tuple[float, float]:
    """Colours and what they mean; where the next entry would stand."""
    x, u = layout.left, layout.unit
    for kinds, meaning in swatches:
        wide = (15 * len(kinds) + 26 + 6.1 * len(meaning)) * u
        if x > layout.left and x + wide > layout.width:
            x, y = layout.left, y + 17 * u
        for number, kind in enumerate(kinds):
            out.rect(x + 15 * u * number, y, 14 * u, 12 * u, kind)
        out.text(x + (15 * len(kinds) + 4) * u, y + 10 * u, meaning, 11 * u, fill=SOFT)
        x += wide
    return x, y


def draw_rows(
    out: Drawing, layout: Layout, rows: Sequence[Row], y: float, suffix: str = ""
) -> float:
    """The grey of idle time, the bars on it with their labels, and what is beside them.

    Args:
        suffix: of the colours' CSS classes.
    """
    u, label = layout.unit, min(12 * layout.unit, layout.row * 0.8)
    titles = sum(len(row.bars) for row in rows) <= _TOOLTIPS
    for row in rows:
        base = y + layout.row / 2 + label * 0.36
        out.text(layout.left - 8 * u, base, row.name, label, "end", kind="left")
        out.rect(layout.left, y, layout.x(row.end) - layout.left, layout.row, "idle row")
        labels = []
        for bar in row.bars:
            height = layout.row / len(bar.parts)
            for i, part in enumerate(bar.parts):
                kind, top = f"box {part.op}{part.chunk}{suffix}", y + i * height
                _bar(out, layout, bar, top, height, kind, titles)
                labels.append(_label(layout, bar, part, top, height))
        if any(labels):
            size = f'font-size="{short(layout.font)}"'
            out.parts.append(f'<g class="n" {size}>{"".join(labels)}</g>')
        if row.note:
            right = layout.width - 12 * u
            out.text(right, base, row.note, label * 0.92, "end", SOFT, kind="right")
        y += layout.row
        thin = layout.row * _LANE
        for lane in row.lanes:
            for bar in lane:
                width = max(layout.plot * (bar.end - bar.start) / layout.span, 0.3)
                place = layout.x(bar.start), y, width, thin
                out.rect(*place, f"copy {bar.parts[0].op}", bar.title if titles else "")
            y += thin
        y += layout.gap
    return y


_LANE = 0.2  # height of a lane, in rows


def _bar(
    out: Drawing, layout: Layout, bar: Bar, y: float, height: float, kind: str, titled: bool
) -> None:
    x, width = layout.x(bar.start), layout.plot * (bar.end - bar.start) / layout.span
    # A hairline between bars, left out where it would eat the bar.
    inset = 0.5 if width > 4 else 0.0
    out.rect(x + inset, y, max(width - 2 * inset, 0.3), height, kind, bar.title if titled else "")


def _label(layout: Layout, bar: Bar, part: Part, y: float, height: float) -> str:
    room, text = layout.plot * (bar.end - bar.start) / layout.span, part.label
    if not layout.font or len(text) * _DIGIT * layout.font > room or layout.font > height:
        return ""
    x, base = layout.x((bar.start + bar.end) / 2), y + height / 2 + layout.font * 0.36
    kind = ' class="l"' if part.chunk else ""
    return f'<text x="{short(x)}" y="{short(base)}"{kind}>{html.escape(text)}</text>'


def axis(out: Drawing, layout: Layout, unit: str, y: float) -> float:
    u = layout.unit
    step = round_step(layout.span, 12)
    lines = [f"M{short(layout.left)} {short(y)}h{short(layout.plot)}"]
    for i in range(math.floor(layout.span / step + 1e-9) + 1):
        x = layout.x(i * step)
        lines.append(f"M{short(x)} {short(y)}v{short(4 * u)}")
        out.text(x, y + 16 * u, decimal(i * step), 11 * u, "middle", SOFT, kind="tick")
    out.parts.append(
        f'<path class="axis" d="{"".join(lines)}" fill="none" stroke="{SOFT}" '
        f'stroke-width="{short(u)}"/>'
    )
    name = unit or "time"
    out.text(layout.width - 12 * u, y + 16 * u, name, 11 * u, "end", SOFT, kind="right")
    return y + 16 * u


def _memory(out: Drawing, layout: Layout, runs: Sequence[Timeline], y: float) -> float:
    """A strip a rank: resident activations over time, and the peak of 1F1B as a dashed line."""
    u, schedule = layout.unit, runs[0].schedule
    reference = reference_peak(schedule)
    note = "activations resident on each rank, in microbatches   ·   dashed: peak of 1F1B, "
    note += str(reference)
    if len(runs) > 1:
        note += "   ·   area planned, line measured"
    out.text(layout.left, y, note, 12 * u, fill=INK)
    out.text(layout.width - 12 * u, y, "peak", 11 * u, "end", SOFT, kind="right")
    y += 9 * u
    for rank in range(schedule.pp):
        y = _strip(out, layout, runs, rank, y, layout.strip) + layout.gap
    return y


def _strip(
    out: Drawing,
    layout: Layout,
    runs: Sequence[Timeline],
    rank: int,
    y: float,
    height: float,
) -> float:
    """Resident activations of a rank: the first run as an area, others as lines."""
    u, chunks, reference = layout.unit, runs[0].schedule.chunks, reference_peak(runs[0].schedule)
    top = max(reference, *(peak for run in runs for peak in run.peak_activation)) * 1.12
    scale = height / (top * chunks)  # px a set
    label = min(12 * u, height * 0.8)
    base, floor = y + height / 2 + label * 0.36, y + height
    out.text(layout.left - 8 * u, base, f"rank {rank}", label, "end", kind="left")
    out.rect(layout.left, y, layout.plot, height, "strip")
    steps = _steps(layout, runs[0], rank, floor, scale)
    edge = layout.x(runs[0].makespan)
    area = f"M{short(layout.left)} {short(floor)}{steps}H{short(edge)}V{short(floor)}Z"
    out.parts.append(f'<path class="area" d="{area}"/>')
    for run in runs[1:]:
        line = f"M{short(layout.left)} {short(floor)}{_steps(layout, run, rank, floor, scale)}"
        out.parts.append(f'<path class="line" d="{line}"/>')
    dashed = short(floor - reference * chunks * scale)
    out.parts.append(
        f'<path class="peak" d="M{short(layout.left)} {dashed}h{short(layout.plot)}"/>'
    )
    peak = decimal(runs[-1].peak_activation[rank])
    right = layout.width - 12 * u
    out.text(right, base, peak, label, "end", weight="bold", kind="right")
    return floor


def _steps(layout: Layout, run: Timeline, rank: int, floor: float, scale: float) -> str:
    return "".join(
        f"H{short(layout.x(time))}V{short(floor - sets * scale)}" for time, sets in run.memory[rank]
    )


def _document(
    out: Drawing, width: float, height: float, runs: Sequence[Timeline], theme: str
) -> str:
    u = width / PLOT
    most = max(run.schedule.chunks for run in runs)
    fills = [
        f".{op.value}{chunk}{'' if chunks == most else f'of{chunks}'}{{fill:{shade}}}"
        for chunks in sorted({run.schedule.chunks for run in runs} | {most})
        for op in DARK
        for chunk, shade in enumerate(shades(op, chunks))
    ]
    copies = ""
    if any(run.copies for run in runs):
        copies = "".join(f".{op.value}{{fill:{color}}}" for op, color in COPIES.items())
    style = (
        f"{NUMBERS}.n .l{{fill:#16202a}}{copies}"
        f".idle{{fill:{IDLE}}}.strip{{fill:{STRIP}}}.area{{fill:{AREA};stroke:{LINE};"
        f"stroke-width:{short(0.8 * u)}}}.line{{fill:none;stroke:{MEASURED};"
        f"stroke-width:{short(1.2 * u)}}}.peak{{fill:none;stroke:{INK};"
        f"stroke-width:{short(0.9 * u)};"
        f"stroke-dasharray:{short(5 * u)} {short(3 * u)}}}" + "".join(fills) + theme_style(theme)
    )
    return out.document(f"Pipeline timeline of {names_of(runs)}", width, height, style)
