"""Points and lines over two axes as a self-contained SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from .palette import GRID, GROUND, INK, SOFT, theme_style

Points = tuple[tuple[float, float], ...]

_WIDTH, _PLOT, _HEIGHT, _TOP, _LEFT = 820, 560, 380, 48, 64
_COLORS = (
    *("#2e6bb0", "#c96a12", "#2a8c67", "#7a4fa3", "#b5483a", "#5b7f95", "#8a5a44", "#16202a"),
)


class Series(NamedTuple):
    """Points of one colour.

    Attributes:
        points: (x, y), filled.
        line: they are joined, in their order.
        under: points to compare with: hollow, joined by a dashed line.
    """

    name: str
    points: Points
    line: bool = False
    under: Points = ()


class _Axes(NamedTuple):
    left: float
    right: float
    top: float
    low: float

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + _PLOT * (point[0] - self.left) / (self.right - self.left)
        y = _TOP + _HEIGHT * (1 - (point[1] - self.low) / (self.top - self.low))
        return x, y


def plot(title: str, x: str, y: str, series: Sequence[Series], *, diagonal: bool = False) -> str:
    """The SVG text.

    Args:
        x, y: what the axes show.
        series: in the order of the legend.
        diagonal: both axes are alike, and where x = y is drawn.
    """
    every = [point for one in series for point in (*one.points, *one.under)]
    xs, ys = [p[0] for p in every], [p[1] for p in every]
    if diagonal:
        xs = ys = [*xs, *ys]
    (left, right, x_step), (low, top, y_step) = _range(xs), _range(ys)
    axes = _Axes(left, right, top, low)
    parts = [text(_LEFT, 26, title, 15, weight="bold")]
    for value in _ticks(left, right, x_step):
        at = axes.at((value, low))
        parts.append(f'<path d="M{at[0]:.1f} {_TOP}v{_HEIGHT}" stroke="{GRID}"/>')
        parts.append(text(at[0], at[1] + 18, f"{value:g}", 11, anchor="middle", fill=SOFT))
    for value in _ticks(low, top, y_step):
        at = axes.at((left, value))
        parts.append(f'<path d="M{_LEFT} {at[1]:.1f}h{_PLOT}" stroke="{GRID}"/>')
        parts.append(text(_LEFT - 8, at[1] + 4, f"{value:g}", 11, anchor="end", fill=SOFT))
    if diagonal:
        parts.append(_path([axes.at((left, left)), axes.at((right, right))], SOFT, "2 3"))
    parts.append(text(_LEFT + _PLOT / 2, _TOP + _HEIGHT + 38, x, 12, anchor="middle"))
    parts.append(text(_LEFT, _TOP - 8, y, 12))
    for number, one in enumerate(series):
        parts += _draw(axes, one, _COLORS[number % len(_COLORS)], _TOP + 8 + 18 * number)
    if any(one.under for one in series):
        legend = _TOP + 20 + 18 * len(series)
        parts.append(text(_LEFT + _PLOT + 24, legend, "hollow, dashed: published", 11, fill=SOFT))
    return document(title, _WIDTH, _TOP + _HEIGHT + 54, parts)


def _draw(axes: _Axes, one: Series, color: str, y: float) -> list[str]:
    parts = []
    under, over = [axes.at(p) for p in one.under], [axes.at(p) for p in one.points]
    if len(under) > 1:
        parts.append(_path(under, color, "5 4"))
    if one.line and len(over) > 1:
        parts.append(_path(over, color))
    parts += [
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{GROUND}" stroke="{color}"/>'
        for a, b in under
    ]
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color}"/>' for a, b in over]
    x = _LEFT + _PLOT + 28
    parts.append(f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="{color}"/>')
    parts.append(text(x + 10, y + 4, one.name, 11.5))
    return parts


def _path(points: Sequence[tuple[float, float]], color: str, dashes: str = "") -> str:
    steps = "".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(points))
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{steps}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    """Ends and steps of an axis: round numbers, from 0 where that wastes less than half of it."""
    low, high = min(values), max(values)
    if 0 < low < high / 2:
        low = 0.0
    rough = (high - low or 1.0) / 6
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def _ticks(low: float, high: float, step: float) -> list[float]:
    return [round(low + i * step, 10) for i in range(round((high - low) / step) + 1)]


def document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """One SVG file on white."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{html.escape(title)}</title>",
            "<style>text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif}"
            f"{theme_style('auto')}</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="{GROUND}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "normal",
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{html.escape(words)}</text>'
    )
