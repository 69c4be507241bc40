"""Plots of rows: published against ours, or both over a size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..view.plot import Series, plot
from .rows import Row

Draw = Callable[[str, Sequence[Row]], str]


def _pair(row: Row) -> tuple[float, float] | None:
    if isinstance(row.published, int | float) and isinstance(row.ours, int | float):
        return float(row.published), float(row.ours)
    return None


def against(x: str, y: str) -> Draw:
    """Ours over published, one colour for what a row's last part names; on the diagonal: equal."""

    def draw(title: str, rows: Sequence[Row]) -> str:
        groups: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            pair = _pair(row)
            if pair is not None:
                groups.setdefault(row.row.rpartition(", ")[2], []).append(pair)
        series = [Series(name, tuple(points)) for name, points in groups.items()]
        return plot(title, x, y, series, diagonal=True)

    return draw


def lines_by(key: str, x: str, y: str) -> Draw:
    """One colour for a row's first part, over ``key``'s number in the rest; published is dashed."""

    def draw(title: str, rows: Sequence[Row]) -> str:
        groups: dict[str, list[tuple[float, float, float]]] = {}
        for row in rows:
            pair = _pair(row)
            name, _, last = row.row.partition(", ")
            number = re.search(rf"\b{key}=([\d.]+)", last)
            if pair is not None and number is not None:
                groups.setdefault(name, []).append((float(number[1]), *pair))
        series = []
        for name, points in groups.items():
            points.sort()
            theirs = tuple((at, value) for at, value, _ in points)
            ours = tuple((at, value) for at, _, value in points)
            series.append(Series(name, ours, line=True, under=theirs))
        return plot(title, x, y, series)

    return draw


DRAWN: dict[str, Callable[..., Draw]] = {"against": against, "lines": lines_by}
