"""The makespan under random pass times: how robust an order is that was made for mean costs."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random
from typing import NamedTuple

from .costs import Durations
from .event_loop import Row
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

    The factors of F, B and W of every stage and microbatch are independent and lognormal, with
    mean 1 and standard deviation ``spread``. Hops and copies of offloaded sets keep their times.
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
    if not 0 <= spread <= MOST:
        raise ValueError(
            f"a jitter must be from 0 to {MOST}, as a fraction of a pass's time, got {spread}"
        )
    if runs < 1:
        raise ValueError(f"jitter needs at least 1 run, got {runs}")
    durations = _fine(schedule.costs.durations(schedule.placement))
    replay = Replay(schedule, durations, network)
    d, microbatches = replay.durations, replay.program.microbatches
    means = [
        took
        for row in (d.forward, d.backward_input, d.backward_weight)
        for took in row
        for _ in range(microbatches)
    ]
    random, deviation = Random(seed), math.sqrt(math.log1p(float(spread) ** 2))
    mean = -(deviation**2) / 2
    times = []
    for _ in range(runs):
        drawn = [round(x * math.exp(random.gauss(mean, deviation))) for x in means]
        times.append(_makespan(replay, _with_times(replay.rows, drawn)))
    times.sort()
    scale = d.scale
    return Spread(
        Fraction(_makespan(replay, replay.rows), scale),
        Fraction(sum(times), runs * scale),
        *(Fraction(times[-(-share * runs // 100) - 1], scale) for share in (50, 95, 100)),
    )


def _fine(d: Durations) -> Durations:
    """In smaller units."""
    return d.times(_FINE, d.scale * _FINE)


def _with_times(rows: list[Row], times: list[int]) -> list[Row]:
    """``rows`` in which an action takes the ``times`` of its results, slot by slot."""
    passes, out = len(times), []
    for row in rows:
        nodes: Row = []
        for node in row:
            lane, j = node
            slot = lane.gives + j
            if slot < passes:  # else an offload action, which takes no time
                took = times[slot]
                if lane.more is not None:
                    took += sum(times[other + j] for other in lane.more.gives)
                node = (lane._replace(took=took), j)
            nodes.append(node)
        out.append(nodes)
    return out


def _makespan(replay: Replay, rows: list[Row]) -> int:
    done, _ = replay.run(rows)
    passes = done.ends[: 3 * replay.program.placement.num_stages * replay.program.microbatches]
    return max(passes, default=0)
