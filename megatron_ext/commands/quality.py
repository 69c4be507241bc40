"""How good a simulated schedule is, compared with the best known bound."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import NamedTuple

from ..schedule.bounds import lower_bound
from ..schedule.generators import generated_by
from ..schedule.memory_cap import Cap
from ..schedule.schedule import Schedule
from ..schedule.simulate import Simulation, simulate
from .common import memory_cap
from .results import short


class Gap(NamedTuple):
    """A schedule's time beside the least of any order at its placement and memory.

    Attributes:
        bound: on the makespan, in units of the costs.
        kind: what it comes from (``schedule.bounds.Bound``).
        above: the schedule's time over the bound, less 1.
        peak: microbatches of activations that the bound allows a rank; None: any number.
        fused: it is of orders with B and W in one pass, as the schedule has.
    """

    bound: Fraction
    kind: str
    above: Fraction
    peak: Fraction | None
    fused: bool

    @property
    def text(self) -> str:
        """A line for people."""
        why = f"{self.kind}, B and W in one pass" if self.fused else self.kind
        if self.peak is not None and self.kind in ("memory", "lifespan"):
            why += f", {short(self.peak)} microbatches"
        what = f"{short(self.bound)} ({why})"
        if not self.above:
            return f"{what}; reached: a longer search gains nothing"
        return f"{what}; {percent(self.above)} above: a longer search gains at most that"


def gap_of(simulation: Simulation, cap: Cap | None) -> Gap | None:
    """The gap at the cap, or at the schedule's own peak if that is more or there is no cap.

    With offload a rank may keep any number of sets, as if copies took no time. None for a schedule
    without backward passes, and for slices or microbatches
    of different costs, of which no bound is known.
    """
    schedule = simulation.schedule
    if schedule.has_units:
        return None
    sets: int | None = max(simulation.peak_sets)
    if not sets:
        return None
    if simulation.transfers is not None:
        sets = None
    elif cap is not None:
        sets = max(sets, cap.most_sets(schedule.placement))
    fused = not schedule.splits_backward
    bound, kind = lower_bound(
        schedule.placement,
        schedule.microbatches,
        schedule.costs,
        sets,
        fused=fused,
        vocabulary=schedule.vocabulary,
        pairs=schedule.has_pairs,
    )
    time = simulation.makespan
    peak = None if sets is None else Fraction(sets, schedule.placement.chunks)
    return Gap(bound, kind, time / bound - 1, peak, fused)


def simulated(schedule: Schedule, args: argparse.Namespace) -> tuple[Simulation, Gap | None]:
    """Run ``schedule``, and compare it with the best at the cap asked for.

    Raises:
        BrokenGenerator: the order cannot run.
    """
    with generated_by(schedule.name):
        simulation = simulate(schedule)
    return simulation, gap_of(simulation, memory_cap(args))


def percent(share: Fraction) -> str:
    """A share for people."""
    return f"{float(100 * share):.3g} %"
