"""The makespan under random pass times: how robust an order is that was made for mean costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import NamedTuple

from .actions import Action, Operation
from .costs import Durations, joint_time
from .effects import KINDS, results
from .event_loop import Program, Row
from .network import Network
from .schedule import Schedule
from .simulate import Replay

RUNS = 100
_FINE = 1 << 20  # parts of the shortest pass, so that rounding random times is no error
MOST = Fraction(2)  # relative standard deviation; beyond, a few passes are all that counts


class Spread(NamedTuple):
    """Makespans of many runs, in units of the costs.

    Attributes:
        exact: the makespan at the costs themselves.
        mean, median, p95, worst: of the runs. ``p95`` is the shortest time that at least 95 % of
            them do not exceed; ``median`` likewise 50 %.
    """

    exact: Fraction
    mean: Fraction
    median: Fraction
    p95: Fraction
    worst: Fraction

    @property
    def ratio(self) -> Fraction:
        """The mean over the makespan at the costs themselves."""
        return self.mean / self.exact if self.exact else Fraction(1)


def jitter(
    schedule: Schedule,
    spread: Fraction | float,
    runs: int = RUNS,
    seed: int = 0,
    network: Network | None = None,
) -> Spread:
    """Makespans of ``schedule``, its order fixed, with every pass time times a random factor.

    The factors of F, B and W of every stage and microbatch, and of the vocabulary's passes of every
    rank, are independent and lognormal, with mean 1 and standard deviation ``spread``. A pass's
    communication with experts takes its factor. Hops, collectives and copies keep their times.
    The same seed gives the same pass times to every order of as many stages and microbatches, so
    few runs suffice to compare two orders.

    Args:
        schedule: as for ``simulate``; its own costs are the means.
        spread: relative standard deviation of a pass time, from 0 to 2.
        runs: how many, at least 1.
        seed: of the factors.
        network: how messages wait for each other; None: not at all.

    Raises:
        ValueError: ``spread`` or ``runs`` is out of range.
        ScheduleError: as ``simulate``.
    """
    schedule.require_whole("--jitter")
    if not 0 <= spread <= MOST:
        raise ValueError(
            f"a jitter must be from 0 to {MOST}, as a fraction of a pass's time, got {spread}"
        )
    if runs < 1:
        raise ValueError(f"jitter needs at least 1 run, got {runs}")
    durations = _fine(schedule.costs.durations(schedule.placement))
    replay = Replay(schedule, durations, network)
    d, drawn = replay.durations, _drawn(replay.program)
    means = [d.of(op, stage) for op, stage, _ in drawn]
    parts = _parts(replay, drawn)
    random, deviation = Random(seed), math.sqrt(math.log1p(float(spread) ** 2))
    mean = -(deviation**2) / 2
    times = []
    for _ in range(runs):
        took = [round(x * math.exp(random.gauss(mean, deviation))) for x in means]
        times.append(replay.makespan(_with_times(replay.rows, parts, took)))
    times.sort()
    scale = d.scale
    return Spread(
        Fraction(replay.makespan(), scale),
        Fraction(sum(times), runs * scale),
        *(Fraction(times[-(-share * runs // 100) - 1], scale) for share in (50, 95, 100)),
    )


def _fine(d: Durations) -> Durations:
    """In smaller units."""
    return d.times(_FINE, d.scale * _FINE)


def _drawn(program: Program) -> list[Action]:
    """All passes that have a time of their own; those of a vocabulary are the last ones."""
    every: dict[Operation, Sequence[int]] = {
        op: range(program.placement.num_stages) for op in KINDS
    }
    if program.vocabulary is not None:
        every |= dict.fromkeys(program.vocabulary.passes, program.vocabulary.stages)
    js = range(program.microbatches)
    return [Action(op, stage, j) for op, row in every.items() for stage in row for j in js]


class _Part(NamedTuple):
    """One pass of an action: where its times are drawn, and how much of the first of them is
    communication, ``sent`` of ``mean``."""

    drawn: list[int]
    sent: int
    mean: int


def _parts(replay: Replay, drawn: Sequence[Action]) -> list[list[list[_Part]]]:
    """Of every action, rank by rank; an offload action has none, and takes no time."""
    where, d = {action: i for i, action in enumerate(drawn)}, replay.durations

    def part(op: Operation, stage: int, j: int) -> _Part:
        at = [where[Action(kind, stage, j)] for kind in results(op)]
        return _Part(at, d.exchange(op, stage), d.of(results(op)[0], stage))

    return [
        [[part(*one) for one in action.parts if action.is_compute] for action in row]
        for row in replay.plain.ranks
    ]


def _with_times(
    rows: Sequence[Row], parts: Sequence[Sequence[Sequence[_Part]]], times: Sequence[int]
) -> list[Row]:
    """``rows`` in which the passes of every action take the drawn ``times``."""
    out: list[Row] = []
    for row, actions in zip(rows, parts):
        nodes: Row = []
        for (lane, j), passes in zip(row, actions):
            if passes:
                alone = [sum([times[i] for i in one.drawn]) for one in passes]
                took = alone[0]
                if len(passes) > 1:
                    sent = (one.sent * times[one.drawn[0]] // one.mean for one in passes)
                    took = joint_time(alone, sum(sent))
                lane = lane._replace(took=took)
            nodes.append((lane, j))
        out.append(nodes)
    return out
