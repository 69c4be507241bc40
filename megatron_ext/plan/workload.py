"""A job with a split of its layers: what costs and bytes follow from."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Costs, Placement, Schedule
from ..schedule.costs import number_to_json
from .collectives import ATTENTION, Links, Overhead, Overlap, overhead
from .gpu import Gpu
from .layout import Split
from .memory import RankBytes, StageBytes, message_bytes, rank_bytes
from .model import Job
from .times import mean_costs


@dataclass(frozen=True)
class Workload:
    """A job with a layer split: what costs and bytes follow from.

    Attributes:
        job: with its microbatch size and recompute.
        split: layers of every stage.
        costs: of the stages, in microseconds.
        stages: bytes of every stage.
        cost_flag: with which training makes orders for these costs; empty: without one.
        gpu: the device.
        overlap: which data-parallel exchange passes hide.
    """

    job: Job
    microbatches: int
    split: Split
    costs: Costs
    stages: tuple[StageBytes, ...]
    cost_flag: str
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


def cost_flag(costs: Costs, gpu: Gpu, pp: int) -> str:
    """The flag with which training makes orders for ``costs``; empty where it measures them."""
    if gpu.has_rates_of_the_table:
        return ""
    mean = mean_costs(costs, pp)
    numbers = mean.forward, mean.backward_input, mean.backward_weight, mean.hop
    return "--pp-cost " + ",".join(str(number_to_json(x)) for x in numbers)
