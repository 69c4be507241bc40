"""``plan --microbatch-cost``: what the answers take where microbatches differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from .._input import shown
from ..plan.point import Point
from ..plan.slices import attention_share
from ..schedule import ScheduleError, ScheduleSpec, select, simulate
from ..schedule.costs import number_to_json
from ..schedule.units import shares_of
from .parser import Options
from .units import factors_of

_FLAG = "--microbatch-cost"


OPTION = Options(
    {
        f"{_FLAG} W,W,...|FILE": "show too what the answers take where microbatches differ, by "
        "factors of the costs of each, or a file as for simulate: after a line `tokens` the length "
        "of each. Answers with another number of microbatches are left out",
    }
)


class Lengths(NamedTuple):
    """One point with microbatches of these lengths.

    Attributes:
        point: with equal ones.
        given: microseconds of an iteration in the order of the file.
        reordered: and in the order that is likely the fastest.
        peak: most activations of a rank, in mean microbatches.
    """

    point: Point
    given: Fraction
    reordered: Fraction
    peak: Fraction

    @property
    def json(self) -> dict[str, Any]:
        """Milliseconds."""
        point = self.point
        return {
            **{"schedule": point.name, "chunks": point.spec.chunks, "pipeline": point.spec.pp},
            "iteration_ms": number_to_json(point.iteration_us / 1000),
            "lengths_ms": number_to_json(self.given / 1000),
            "reordered_ms": number_to_json(self.reordered / 1000),
            "peak_activation": number_to_json(self.peak),
        }


def of_points(text: str, points: Sequence[Point]) -> list[Lengths]:
    """What ``points`` take, the fastest first.

    Pairs, slices and a sharded vocabulary are for equal microbatches: such points are left out, as
    are those with another number of microbatches than ``text`` has.

    Raises:
        ValueError: the text is wrong, or fits no point.
    """
    found, counts = [], set()
    number = len(factors_of(text, Fraction(0)))
    for point in points:
        spec, job = point.spec, point.job
        if not point.is_pipeline or spec.overlap or spec.slices or spec.barriers:
            continue
        counts.add(spec.microbatches)
        if spec.microbatches == number:
            share = attention_share(job.seq_length, job.hidden_size)
            shares = shares_of((1,) * number, share, False, factors_of(text, share))
            cut = replace(spec, costs=spec.costs.with_units(shares))
            found += [one for one in [_lengths(point, cut)] if one is not None]
    if not found:
        has = f"have {' or '.join(map(str, sorted(counts)))}" if counts else "take equal ones only"
        raise ValueError(
            f"{_FLAG} {shown(text)} has {number} microbatches, but the answers {has}; give one "
            "factor each, or other sizes or --schedules"
        )
    return sorted(found, key=lambda one: (min(one.given, one.reordered), one.point.key()))


def _lengths(point: Point, spec: ScheduleSpec) -> Lengths | None:
    """None: the schedule takes equal microbatches only."""
    beside = point.iteration_us - point.makespan_us
    try:
        runs = [
            simulate(select(replace(spec, reorder=reorder)).schedule) for reorder in (False, True)
        ]
    except ScheduleError:
        return None
    given, reordered = (run.makespan + beside for run in runs)
    return Lengths(point, given, reordered, max(runs[0].peak_activation))


def text_of(rows: Sequence[dict[str, Any]], asked: str) -> list[str]:
    """For people."""
    lines = ["", f"with microbatches of {asked}, of the points above:"]
    for row in rows:
        lines.append(
            f"  {row['schedule']}, {row['chunks']} chunks, {row['pipeline']} ranks: "
            f"{row['lengths_ms']:.1f} ms an iteration, reordered {row['reordered_ms']:.1f}, at "
            f"most {row['peak_activation']:.3g} mean microbatches' activations a rank; equal "
            f"ones {row['iteration_ms']:.1f} ms"
        )
    return lines
