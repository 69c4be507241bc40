"""Costs and gains of optimizer post-validation: copies of optimizer state, a shorter iteration.

From a rank's step until it is validated, what the step has changed is there twice: main parameters
and optimizer state (and parameters, where they are the main ones). The only activation sets then
are those of the passes that have begun the next iteration, so the copies often fit beneath a peak
that is there anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ..schedule.actions import Op
from ..schedule.effects import passes
from ..schedule.passes.lower import lower
from ..schedule.post_validation import add_post_validation, head_length, steady_time
from .memory import MESSAGES, message_bytes
from .point import Point
from .work import MOST, Work, full


@dataclass(frozen=True)
class PostValidationEstimate:
    """One point under ``--pp-post-validation``.

    Attributes:
        step_us: from one iteration to the next, in microseconds.
        copies: bytes of every rank's copies.
        peaks: bytes of every rank's peak.
    """

    step_us: Fraction
    copies: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def worst(self) -> int:
        """Of the rank with most bytes."""
        return max(self.peaks)


def takes_long(point: Point) -> bool:
    """True if ``with_post_validation`` needs a large part of a search's work."""
    return not Work(MOST).affords(replace(point.spec, effort=full()), _REST)


def with_post_validation(point: Point) -> PostValidationEstimate:
    """``point`` with its order made for the longest rank, and its optimizer stepping ahead."""
    work, job = point.workload, point.workload.job
    schedule = point.schedule("span")
    lowered = add_post_validation(lower(schedule))
    copies, peaks = [], []
    for usual, row in zip(point.ranks, lowered.ranks):
        own = job.params_dtype == "fp32"
        copied = usual.states.optimizer + (usual.states.parameters if own else 0)
        begun = [a for a in passes(row[: head_length(row)]) if a.op is Op.F]
        kept = sum(work.stages[a.stage].sets.bytes_f_to_b for a in begun)
        doubt = usual.states.total + copied + kept + MESSAGES * message_bytes(job)
        copies.append(copied)
        peaks.append(max(usual.total, doubt))
    steady = steady_time(lowered, network=work.network)
    return PostValidationEstimate(steady, tuple(copies), tuple(peaks))


_REST = 0.6  # of a search's work, that is left behind a short one
