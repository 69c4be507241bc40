"""The order that ``plan --output`` writes."""

from __future__ import annotations

from ..plan.point import Point
from ..schedule import save
from .common import InputError, output


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
    with output(path) as target:
        save(point.schedule(), target)
