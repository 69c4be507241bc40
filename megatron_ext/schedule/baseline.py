"""Megatron's own 1F1B for the pipeline of a schedule: what every gain is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from .costs import merged
from .generators import generate
from .schedule import Schedule
from .simulate import simulate


@dataclass(frozen=True)
class Promise:
    """What a plan promises by simulation.

    Attributes:
        bubble: mean over ranks of the share of the time in which a rank computes nothing.
        peak: most activation sets on a rank at once, in microbatches.
    """

    bubble: Fraction
    peak: Fraction

    @property
    def bubble_text(self) -> str:
        """In percent."""
        return f"{float(100 * self.bubble):.1f} %"

    @property
    def peak_text(self) -> str:
        """In microbatches."""
        return f"{float(self.peak):.4g}"


def promise(schedule: Schedule) -> Promise:
    """By simulation at the schedule's own costs, lowered or not."""
    run = simulate(schedule.unlowered())
    return Promise(run.bubble, max(run.peak_activation))


def stock(schedule: Schedule) -> Schedule | None:
    """1F1B with as many ranks and microbatches, each rank with as many layers one after the other.

    None where the costs do not say what those layers take: the vocabulary is sharded.
    """
    if schedule.barriers or schedule.costs.vocabulary is not None:
        return None
    costs = merged(replace(schedule.costs, units=None), schedule.pp)
    assert costs is not None  # a rank has whole stages
    return generate("1f1b", schedule.pp, schedule.microbatches, costs=costs)
