"""How good a simulated schedule is: beside the best known bound, and under random pass times."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any, NamedTuple

from ..schedule.bounds import lower_bound
from ..schedule.costs import number_to_json
from ..schedule.generators import MOST_SECONDS, generated_by
from ..schedule.jitter import RUNS, Spread, jitter
from ..schedule.memory_cap import Cap
from ..schedule.network import Network
from ..schedule.passes.lower import lower
from ..schedule.schedule import Schedule
from ..schedule.simulate import Simulation, simulate
from .common import InputError, memory_cap
from .results import short


class Gap(NamedTuple):
    """A schedule's time beside the least of any order at its placement and memory.

    Attributes:
        bound: on the makespan, or on the longest rank's own span, in units of the costs.
        kind: what it comes from (``schedule.bounds.Bound``).
        above: the schedule's time over the bound, less 1.
        peak: microbatches of activations that the bound allows a rank; None: any number.
        fused: it is of orders with B and W in one pass, as the schedule has.
        span: it is on the span.
    """

    bound: Fraction
    kind: str
    above: Fraction
    peak: Fraction | None
    fused: bool
    span: bool

    @property
    def json(self) -> dict[str, Any]:
        """The fields of a schedule."""
        return {
            "lower_bound": number_to_json(self.bound),
            "bound_kind": self.kind,
            "above_bound": number_to_json(self.above),
        }

    @property
    def text(self) -> str:
        """A line for people."""
        why = f"{self.kind}, B and W in one pass" if self.fused else self.kind
        if self.peak is not None and self.kind in ("memory", "lifespan"):
            why += f", {short(self.peak)} microbatches"
        what = f"{short(self.bound)}{' of the span' if self.span else ''} ({why})"
        if not self.above:
            return f"{what}; reached: a longer search gains nothing"
        return f"{what}; {percent(self.above)} above: a longer search gains at most that"


def gap_of(simulation: Simulation, cap: Cap | None, objective: str | None) -> Gap | None:
    """The gap at the cap, or at the schedule's own peak if that is more or there is no cap.

    With offload a rank may keep any number of sets, as if copies took no time. None for a schedule
    without backward passes, for the span beside vocabulary passes, and for slices or microbatches
    of different costs, of which no bound is known.
    """
    schedule, span = simulation.schedule, objective == "span"
    if schedule.has_units:
        return None
    if schedule.barriers and span:
        return None  # whose rank's own span has vocabulary passes before its first F
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
        span=span,
        vocabulary=schedule.vocabulary,
        pairs=schedule.has_pairs,
    )
    time = simulation.makespan
    if span:
        longest = max(end[-1] - start[0] for start, end in zip(simulation.start, simulation.end))
        time = Fraction(longest, simulation.scale)
    peak = None if sets is None else Fraction(sets, schedule.placement.chunks)
    return Gap(bound, kind, time / bound - 1, peak, fused, span)


_PASS_SECONDS = 3e-6  # of a pass of a random run, measured


class Jitter(NamedTuple):
    """What ``--jitter``, ``--runs`` and ``--seed`` ask for."""

    spread: Fraction
    runs: int
    seed: int

    def of(self, schedule: Schedule, network: Network | None) -> Spread:
        """Makespans of ``schedule``, lowered if there is a network."""
        return jitter(schedule, self.spread, self.runs, self.seed, network)

    def refuse_many(self, schedule: Schedule) -> None:
        """Before runs that would take minutes."""
        passes = sum(len(row) for row in schedule.ranks)
        seconds = self.runs * passes * _PASS_SECONDS
        if seconds > MOST_SECONDS:
            raise InputError(
                f"{self.runs} random runs of {passes} passes would take about {seconds:.2g} s, "
                f"and more than {MOST_SECONDS} s are not begun; give fewer --runs"
            )

    def json(self, spread: Spread) -> dict[str, Any]:
        """The field of a schedule."""
        times = {name: float(value) for name, value in spread._asdict().items() if name != "exact"}
        asked = {"jitter": float(self.spread), "runs": self.runs, "seed": self.seed}
        return {"makespan_quantiles": {**asked, **times, "ratio": float(spread.ratio)}}

    def text(self, spread: Spread) -> str:
        """A line for people."""
        return (
            f"mean {short(spread.mean)} ({percent(spread.ratio - 1)} longer), median "
            f"{short(spread.median)}, 95 % within {short(spread.p95)}, worst "
            f"{short(spread.worst)}; pass times +- {percent(self.spread)}, {self.runs} runs, "
            f"seed {self.seed}"
        )


def jitter_of(args: argparse.Namespace) -> Jitter | None:
    """What the options ask for; None without ``--jitter``."""
    return None if args.jitter is None else Jitter(args.jitter, args.runs or RUNS, args.seed or 0)


class Quality(NamedTuple):
    """How good a schedule is.

    Attributes:
        gap: to the bound; None without backward passes.
        noise: what was asked for; None if nothing was.
        spread: the makespan under random pass times; None if that was not asked for.
    """

    gap: Gap | None
    noise: Jitter | None
    spread: Spread | None

    @property
    def json(self) -> dict[str, Any]:
        """The fields of a schedule."""
        fields = {} if self.gap is None else self.gap.json
        if self.noise is not None and self.spread is not None:
            fields |= self.noise.json(self.spread)
        return fields

    @property
    def jitter_text(self) -> str:
        """A line for people; empty without random runs."""
        noisy = self.noise is not None and self.spread is not None
        return self.noise.text(self.spread) if noisy else ""  # type: ignore[union-attr, arg-type]


def simulated(
    schedule: Schedule, args: argparse.Namespace, network: Network | None, noise: Jitter | None
) -> tuple[Simulation, Quality]:
    """Run ``schedule``, and compare it with the best at the cap and by the objective asked for.

    Raises:
        InputError: more random runs are asked for than end soon.
        BrokenGenerator: the order cannot run.
    """
    if noise is not None:
        noise.refuse_many(schedule)
    with generated_by(schedule.name):
        if network is not None and not schedule.is_lowered:
            schedule = lower(schedule)
        simulation = simulate(schedule, network=network)
    gap = gap_of(simulation, memory_cap(args), args.objective)
    spread = None if noise is None else noise.of(schedule, network)
    return simulation, Quality(gap, noise, spread)


def percent(share: Fraction) -> str:
    """A share for people."""
    return f"{float(100 * share):.3g} %"
