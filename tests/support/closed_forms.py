"""Makespans and peaks of schedules in closed form, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

Number = Fraction | int


class Form(NamedTuple):
    """A schedule at F = B = W = 1 and no hop, on p ranks with m microbatches and v chunks a rank.

    Attributes:
        text: of both.
        makespan: of (p, m, v).
        peak: of (p, v): activations of the worst rank in microbatches, for more than p of them.
        chunks: v for which it is checked; None: the schedule has its own.
        least: from how many times p microbatches on it holds.
        multiple: it holds where p divides m.
    """

    text: str
    makespan: Callable[[int, int, int], Number]
    peak: Callable[[int, int], Number]
    chunks: tuple[int | None, ...] = (None,)
    least: int = 1
    multiple: bool = False


def _capped(sets: Callable[[int], int]) -> Callable[[int, int, int], Fraction]:
    # The second term is the work of a rank and the way to the last one; it counts at p = 2.
    return lambda p, m, _: Fraction(max(6 * m + 6 * p - 3 * sets(p) - 1, 6 * m + p - 1), 2)


def half_sets(p: int) -> int:
    """V-Half's activation sets, each of one of two chunks."""
    return 2 * ((p + 2) // 2)


def min_sets(p: int) -> int:
    """V-Min's."""
    return 2 * ((p + 4) // 3)


FORMS = {
    "1f1b": Form("3(m + p - 1), peak p", lambda p, m, _: 3 * (m + p - 1), lambda p, _: p),
    "interleaved": Form(
        "3m + 3(p - 1)/v, peak p + (p - 1)/v",
        lambda p, m, v: 3 * m + Fraction(3 * (p - 1), v),
        lambda p, v: p + Fraction(p - 1, v),
        (2, 3, 4),
        multiple=True,
    ),
    "zb-h1": Form("3m + p - 1, peak p", lambda p, m, _: 3 * m + p - 1, lambda p, _: p),
    "zb-h2": Form(
        "3m + p - 1, peak 2p - 1", lambda p, m, _: 3 * m + p - 1, lambda p, _: 2 * p - 1, least=2
    ),
    "interleaved-zb": Form(
        "3m + (p - 1)/v, peak p",
        lambda p, m, v: 3 * m + Fraction(p - 1, v),
        lambda p, _: p,
        (2, 3, 4),
        least=2,
    ),
    "v-min": Form(
        "(6m + 6p - 3k - 1)/2, peak k/2 = floor((p + 4)/3)",
        _capped(min_sets),
        lambda p, _: Fraction(min_sets(p), 2),
    ),
    "v-half": Form(
        "(6m + 6p - 3k - 1)/2, peak k/2 = floor((p + 2)/2)",
        _capped(half_sets),
        lambda p, _: Fraction(half_sets(p), 2),
    ),
    "v-zb": Form(
        "(6m + p - 1)/2, peak p", lambda p, m, _: Fraction(6 * m + p - 1, 2), lambda p, _: p
    ),
    "dualpipev": Form(
        "3m + p - 1, peak p + 1/2",
        lambda p, m, _: 3 * m + p - 1,
        lambda p, _: p + Fraction(1, 2),
        least=2,
    ),
}


def gis_bubble(p: int, group: int, chunks: int, costs: Any) -> Fraction:
    """Of PipeOffload's GIS in its published order, for a multiple of ``group`` microbatches."""
    f, b, w = (x / chunks for x in (costs.forward, costs.backward_input, costs.backward_weight))
    hole = (p - group) * f + max(Fraction(0), p * b - group * (b + w))
    return (p - 1) * (f + b) + (chunks - 1) * hole


def gis_peaks(p: int, m: int, chunks: int, group: int) -> list[int]:
    """Of GIS, by rank, in activation sets of a chunk."""
    return [min(m * chunks, min(group, m) * (chunks - 1) + p - i) for i in range(p)]
