"""The answer of ``plan``: the front beside the user's own flags and stock, and the order's file."""

from __future__ import annotations

from typing import Any

from ..plan.point import Point
from ..schedule import save
from ..view.table import columns
from .common import InputError, writing
from .plan_baseline import gain, reference
from .plan_text import assumptions_text, difference_text, report_text, table_of


def answer(data: dict[str, Any], *, every: bool) -> str:
    """The whole answer for people.

    Args:
        every: with all assumptions.
    """
    end = [*assumptions_text(data, every), *difference_text(data)]
    return "\n".join([report_text(data, table(data)), *end])


def table(data: dict[str, Any]) -> list[str]:
    """The points of the front with their gain, and what they are compared with."""
    rows = data["baselines"]
    error = data["expected_error"]
    beside = reference(rows)
    heads, *cells = table_of([*data["front"], *rows])
    for point, row in zip(data["front"], cells):
        row.append("-" if beside is None else _percent(gain(point, beside), error))
    for base, row in zip(rows, cells[len(data["front"]) :]):
        row[0] = f"{base['what']}: {row[0]}{'' if base['fits'] else ' (too large)'}"
        alone = base is beside or base["gain"] is None
        row.append("-" if alone else _percent(base["gain"], error))
    if not cells:
        return _legend(data)
    return [*columns([[*heads, "gain"], *cells]), *_legend(data)]


def _percent(share: float, error: float) -> str:
    """``~`` before what is less than the error to expect."""
    return f"{'~' if 0 < abs(share) < error else ''}{100 * share:.1f} %"


def _legend(data: dict[str, Any]) -> list[str]:
    lines = []
    beside = reference(data["baselines"])
    if beside is not None:
        lines = [
            "yours: your flags as they are; stock: the best of Megatron's own schedules that fits, "
            f"with its recompute; gain: less time an iteration than {beside['what']}",
        ]
        if data["expected_error"]:
            lines.append(
                f"~: less than the error to expect, {data['expected_error']:.0%}: not told apart "
                f"from {beside['what']} by this model, so measure both"
            )
    if data["yours_impossible"]:
        lines.append(f"yours has no row: {data['yours_impossible']}")
    return lines


def save_order(path: str, point: Point) -> None:
    """Write a point's schedule, with its offload, to a file.

    Raises:
        InputError: there is none, without a pipeline.
    """
    if not point.is_pipeline:
        raise InputError(
            f"--output {path}: the fastest is without a pipeline, which has no schedule; give --pp "
            "or --schedules for the fastest pipeline"
        )
    with writing(path):
        save(point.schedule(), path)
