"""Bubble against memory as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.schedule_sweep import Row, Setting, describe
from megatron_ext.view.drawing import element
from megatron_ext.view.palette import SOFT
from megatron_ext.view.plot import Axes, Point

_FAMILIES = (
    ("torch", "#7a4fa3"),
    ("v-", "#2a8c67"),
    ("interleaved-zb", "#2e6bb0"),
    ("interleaved", "#c96a12"),
    ("zb", "#5b7f95"),
    ("", "#8a5a44"),
)


def pareto(setting: Setting, rows: Sequence[Row], curve: Sequence[Row]) -> str:
    """Numbered points for ``rows``, a line for ``curve`` (v-cap at every cap), and a legend."""
    every = [*rows, *curve]
    right = max(math.ceil(4 * max(row.memory for row in every)) / 4, 1.0)
    top = max(math.ceil(20 * max(row.bubble for row in every)) / 20, 0.05)
    axes = Axes(64, 56, 640, 420, (0, right), (0, top))
    axes.text(axes.left, 26, "Bubble against peak activation", 16, weight="bold")
    axes.text(axes.left, 44, f"{describe(setting)}; lower left is better", 12, fill=SOFT)
    shares = [i / 4 for i in range(round(right * 4) + 1)]
    step = 0.05 if top <= 0.5 else 0.1
    bubbles = [i * step for i in range(round(top / step) + 1)]
    axes.grid([(x, f"{x:g}") for x in shares], [(y, f"{100 * y:.0f} %") for y in bubbles])
    caption = "peak activation of the worst rank, as a share of 1F1B's"
    axes.text(axes.left + axes.width / 2, axes.bottom + 40, caption, 12, "middle")
    places = [axes.at((row.memory, row.bubble)) for row in curve]
    axes.path(places, "#2a8c67", width="2")
    for place in places:
        axes.dot(place, "2.5", "#2a8c67")
    legend = _rows(axes, sorted(rows, key=lambda row: (row.memory, row.bubble)))
    title = f"Bubble against peak activation, {describe(setting)}"
    return axes.file(title, 980, max(axes.bottom + 60, legend + 24))


def _rows(axes: Axes, rows: Sequence[Row]) -> float:
    """Markers, over the lines that lead to them, and the legend; returns where that ends."""
    placed: list[Point] = []
    legend = axes.top + 6.0
    named = []
    for number, row in enumerate(rows, 1):
        color = next(color for start, color in _FAMILIES if row.name.startswith(start))
        place = axes.at((row.memory, row.bubble))
        at = _free(axes, place, placed)
        placed.append(at)
        if at != place:  # moved aside: a thin line leads to the true place
            (x, y), (to_x, to_y) = place, at
            line = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
            axes.parts.append(
                element("path", d=line, stroke=color, stroke_width="0.8")
                + element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2, fill=color)
            )
        label = f"{row.name}: {100 * row.bubble:.1f} %, {row.memory:.2f}"
        axes.text(axes.right + 50, legend + 4, label, 11.5)
        named.append((number, color, at, legend))
        legend += 20
    axes.text(axes.right + 26, legend + 6, "line: v-cap at every cap", 11.5)
    for number, color, at, beside in named:
        for place in (at, (axes.right + 36, beside)):
            axes.dot(place, "8.5", color)
            axes.text(place[0], place[1] + 3.5, str(number), 10, "middle", "#fff")
    return legend


def _free(axes: Axes, place: Point, placed: Sequence[Point]) -> Point:
    """The nearest place where a marker covers no other one."""
    for radius in range(0, 200, 6):
        for step in range(12 if radius else 1):
            angle = math.pi * step / 6
            at = (place[0] + radius * math.cos(angle), place[1] - radius * math.sin(angle))
            inside = at[0] > axes.left + 10 and axes.top < at[1] < axes.bottom - 10
            if inside and all(math.dist(at, other) >= 18 for other in placed):
                return at
    return place
