"""A job with a split of its layers: what costs and bytes follow from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import NamedTuple

from ..schedule import Costs, Placement, Schedule
from ..schedule.costs import number_to_json
from .collectives import ATTENTION, Links, Overhead, Overlap, overhead
from .gpu import Gpu
from .layout import Split
from .memory import RankBytes, StageBytes, message_bytes, rank_bytes
from .model import Job
from .profile import Profile
from .times import mean_costs


class ByName(NamedTuple):
    """What training makes an order for if it is given a schedule's name.

    Attributes:
        flag: with which it does; empty: without one.
        costs: that it makes the order for.
    """

    flag: str
    costs: Costs


@dataclass(frozen=True)
class Workload:
    """A job with a layer split: what costs and bytes follow from.

    Attributes:
        job: with its microbatch size and recompute.
        split: layers of every stage.
        costs: of the stages, in microseconds.
        stages: bytes of every stage.
        by_name: how training comes to these costs.
        gpu: the device.
        overlap: which data-parallel exchange passes hide.
    """

    job: Job
    microbatches: int
    split: Split
    costs: Costs
    stages: tuple[StageBytes, ...]
    by_name: ByName
    gpu: Gpu
    overlap: Overlap

    def ranks(self, schedule: Schedule) -> list[RankBytes]:
        """Every rank's bytes at its peak under ``schedule``."""
        return rank_bytes(schedule, self.stages, message_bytes(self.job))

    def peak(self, schedule: Schedule) -> int:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.ranks(schedule))

    def overhead(self, placement: Placement) -> Overhead:
        """What an iteration does beside its passes, on the rank where that takes longest."""
        links = Links(self.gpu)
        rows = [[self.stages[s] for s in row] for row in placement.stages]
        costs, layers, split = self.costs.stages or (), self.job.layers, self.split.stages
        passes = [
            (
                float(sum(costs[s][0] for s in row)) / 1e6,
                float(sum(costs[s][1] + costs[s][2] for s in row)) / 1e6,
            )
            for row in placement.stages
        ]
        attention = [
            sum(any(k in ATTENTION for k in layers[n]) for s in row for n in split[s].layers)
            for row in placement.stages
        ]
        return overhead(self.job, links, rows, passes, attention, self.microbatches, self.overlap)


def named_by(costs: Costs, profile: Profile | None, split: Split, gpu: Gpu, pp: int) -> ByName:
    """How training comes to ``costs``, of which the order of a name is made.

    Args:
        profile: measured; None: they are estimated for ``gpu``.
    """
    if profile is not None and profile.path:
        return ByName(f"--pp-profile {shlex.quote(profile.path)}", profile.costs(split))
    if profile is None and gpu.has_rates_of_the_table:
        return ByName("", costs)  # training measures them
    mean = mean_costs(costs, pp)
    numbers = mean.forward, mean.backward_input, mean.backward_weight, mean.hop
    return ByName("--pp-cost " + ",".join(str(number_to_json(x)) for x in numbers), mean)
