"""Points and lines over two axes as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .drawing import Drawing, round_step
from .palette import GRID, GROUND, SOFT, theme_style

Point = tuple[float, float]
Points = tuple[Point, ...]

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


class Axes(Drawing):
    """A plane of ``width`` times ``height`` px with its upper left corner at ``left``, ``top``.

    Args:
        x, y: the values at the ends of each axis.
    """

    number = staticmethod("{:.1f}".format)
    ink, weight, space = "", "normal", ""

    def __init__(
        self, left: int, top: int, width: int, height: int, x: tuple[float, float], y: Point
    ) -> None:
        super().__init__()
        self.left, self.top, self.width, self.height = left, top, width, height
        self._x, self._y = x, y

    @property
    def right(self) -> int:
        """Where the plane ends."""
        return self.left + self.width

    @property
    def bottom(self) -> int:
        """Where the plane ends."""
        return self.top + self.height

    def at(self, point: Point) -> Point:
        """Where values stand, in px."""
        (low_x, high_x), (low_y, high_y) = self._x, self._y
        x = self.left + self.width * (point[0] - low_x) / (high_x - low_x)
        return x, self.top + self.height * (1 - (point[1] - low_y) / (high_y - low_y))

    def grid(self, xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]]) -> None:
        """Lines at values with their labels."""
        for value, label in xs:
            x, _ = self.at((value, self._y[0]))
            self.add("path", d=f"M{x:.1f} {self.top}v{self.height}", stroke=GRID)
            self.text(x, self.bottom + 18, label, 11, "middle", SOFT)
        for value, label in ys:
            _, y = self.at((self._x[0], value))
            self.add("path", d=f"M{self.left} {y:.1f}h{self.width}", stroke=GRID)
            self.text(self.left - 8, y + 4, label, 11, "end", SOFT)

    def path(
        self, points: Iterable[Point], color: str, dashes: str = "", width: str = "1.6"
    ) -> None:
        """A line through places in px."""
        steps = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        line = {"stroke": color, "stroke_width": width, "stroke_dasharray": dashes}
        self.add("path", d=steps, fill="none", **line)

    def dot(self, place: Point, radius: str, color: str, edge: str = "") -> None:
        """A point at a place in px."""
        x, y = map(self.number, place)
        self.add("circle", cx=x, cy=y, r=radius, fill=color, stroke=edge)

    def file(self, title: str, width: float, height: float) -> str:
        """The SVG text."""
        return self.document(title, width, height, theme_style("auto"))


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
    x_ticks, y_ticks = _ticks(xs), _ticks(ys)
    (left, right), (low, top) = ((ticks[0], ticks[-1]) for ticks in (x_ticks, y_ticks))
    axes = Axes(64, 48, 560, 380, (left, right), (low, top))
    axes.text(axes.left, 26, title, 15, weight="bold")
    axes.grid(*([(value, f"{value:g}") for value in ticks] for ticks in (x_ticks, y_ticks)))
    if diagonal:
        axes.path([axes.at((left, left)), axes.at((right, right))], SOFT, "2 3")
    axes.text(axes.left + axes.width / 2, axes.bottom + 38, x, 12, "middle")
    axes.text(axes.left, axes.top - 8, y, 12)
    for number, one in enumerate(series):
        _draw(axes, one, _COLORS[number % len(_COLORS)], axes.top + 8 + 18 * number)
    if any(one.under for one in series):
        note, below = "hollow, dashed: published", axes.top + 20 + 18 * len(series)
        axes.text(axes.right + 24, below, note, 11, fill=SOFT)
    return axes.file(title, 820, axes.bottom + 54)


def _draw(axes: Axes, one: Series, color: str, legend: float) -> None:
    under, over = [axes.at(p) for p in one.under], [axes.at(p) for p in one.points]
    if len(under) > 1:
        axes.path(under, color, "5 4")
    if one.line and len(over) > 1:
        axes.path(over, color)
    for place in under:
        axes.dot(place, "4", GROUND, color)
    for place in over:
        axes.dot(place, "4", color)
    x = axes.right + 28
    axes.add("circle", cx=x, cy=f"{legend:.1f}", r="4", fill=color)
    axes.text(x + 10, legend + 4, one.name, 11.5)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around all values, from 0 where that wastes less than half of the axis."""
    low, high = min(values), max(values)
    if 0 < low < high / 2:
        low = 0.0
    step = round_step(high - low or 1.0, 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]
