"""Bubble against memory as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.schedule_sweep import Row, Setting, describe
from megatron_ext.view.plot import GRID, INK, SOFT, document, text

_WIDTH, _PLOT, _HEIGHT, _TOP, _LEFT = 980, 640, 420, 56, 64
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

    def x(row: Row) -> float:
        return _LEFT + _PLOT * row.memory / right

    def y(row: Row) -> float:
        return _TOP + _HEIGHT * (1 - row.bubble / top)

    parts = [text(_LEFT, 26, "Bubble against peak activation", 16, weight="bold")]
    parts.append(text(_LEFT, 44, f"{describe(setting)}; lower left is better", 12, fill=SOFT))
    parts += _grid(right, top)
    line = "".join(f"{'L' if i else 'M'}{x(row):.1f} {y(row):.1f}" for i, row in enumerate(curve))
    parts.append(f'<path d="{line}" fill="none" stroke="#2a8c67" stroke-width="2"/>')
    parts += [f'<circle cx="{x(r):.1f}" cy="{y(r):.1f}" r="2.5" fill="#2a8c67"/>' for r in curve]
    ordered = sorted(rows, key=lambda row: (row.memory, row.bubble))
    placed: list[tuple[float, float]] = []
    markers: list[str] = []  # drawn last, over the lines that lead to them
    legend_y = _TOP + 6.0
    for number, row in enumerate(ordered, 1):
        color = next(color for start, color in _FAMILIES if row.name.startswith(start))
        at = _free(x(row), y(row), placed)
        placed.append(at)
        if at != (x(row), y(row)):  # moved aside: a thin line leads to the true place
            parts.append(
                f'<path d="M{x(row):.1f} {y(row):.1f}L{at[0]:.1f} {at[1]:.1f}" '
                f'stroke="{color}" stroke-width="0.8"/>'
                f'<circle cx="{x(row):.1f}" cy="{y(row):.1f}" r="2" fill="{color}"/>'
            )
        markers += _marker(at, number, color)
        markers += _marker((_LEFT + _PLOT + 36, legend_y), number, color)
        label = f"{row.name}: {100 * row.bubble:.1f} %, {row.memory:.2f}"
        parts.append(text(_LEFT + _PLOT + 50, legend_y + 4, label, 11.5))
        legend_y += 20
    parts.append(text(_LEFT + _PLOT + 26, legend_y + 6, "line: v-cap at every cap", 11.5))
    height = max(_TOP + _HEIGHT + 60, legend_y + 24)
    title = f"Bubble against peak activation, {describe(setting)}"
    return document(title, _WIDTH, height, [*parts, *markers])


def _free(x: float, y: float, placed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The nearest place where a marker covers no other one."""
    for radius in range(0, 200, 6):
        for step in range(12 if radius else 1):
            angle = math.pi * step / 6
            at = (x + radius * math.cos(angle), y - radius * math.sin(angle))
            inside = at[0] > _LEFT + 10 and _TOP < at[1] < _TOP + _HEIGHT - 10
            if inside and all(math.dist(at, other) >= 18 for other in placed):
                return at
    return x, y


def _marker(at: tuple[float, float], number: int, color: str) -> list[str]:
    return [
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="8.5" fill="{color}"/>',
        text(at[0], at[1] + 3.5, str(number), 10, anchor="middle", fill="#fff"),
    ]


def _grid(right: float, top: float) -> list[str]:
    parts = []
    for i in range(round(right * 4) + 1):
        share = i / 4
        x = _LEFT + _PLOT * share / right
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="{GRID}"/>')
        parts.append(text(x, _TOP + _HEIGHT + 18, f"{share:g}", 11, anchor="middle", fill=SOFT))
    step = 0.05 if top <= 0.5 else 0.1
    for i in range(round(top / step) + 1):
        y = _TOP + _HEIGHT * (1 - i * step / top)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_PLOT}" stroke="{GRID}"/>')
        label = f"{100 * i * step:.0f} %"
        parts.append(text(_LEFT - 8, y + 4, label, 11, anchor="end", fill=SOFT))
    caption = "peak activation of the worst rank, as a share of 1F1B's"
    middle = _LEFT + _PLOT / 2
    parts.append(text(middle, _TOP + _HEIGHT + 40, caption, 12, anchor="middle", fill=INK))
    return parts
