"""Costs that an order is made for where none are given and none are measured yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from math import inf

from ..schedule.costs import Costs, number_to_json
from .budget import Splits
from .gpu import Gpu, gpu_called
from .model import Job, PlanError
from .times import (
    costs_in_parts,
    costs_in_us,
    exchange_shares,
    hop_time,
    stage_times,
    vocabulary_times,
    with_exchange,
)

# With one FLOP/s and no other limit a pass takes as many seconds as it has FLOPs.
_FLOPS = Gpu("", 1.0, 0, inf, inf, inf, inf, inf, efficiency=1.0)

_EXCHANGE = Fraction(1, 3)  # of F, in models with experts on several ranks


@dataclass(frozen=True)
class Estimate:
    """The planner's times of a run's passes, or their FLOPs where the device is not known.

    FLOPs have the ratios of passes and stages that no device changes; they know neither memory
    traffic nor links, so a hop is 0.

    Attributes:
        job: what is trained; None: it cannot be described.
        splits: layers of every stage, for a number of stages.
        device: an accelerator's name as its driver has it.
        reason: why there is no job; with a job: why only FLOPs count, whatever the device.
    """

    job: Job | None
    splits: Splits
    device: str = ""
    reason: str = ""

    def with_vocabulary(self, padded: int | None) -> Estimate:
        """The same for a padded vocabulary of this size; None: as it is."""
        if self.job is None or padded is None:
            return self
        return replace(self, job=self.job.with_(padded_vocab_size=padded))

    def costs(self, stages: int) -> Costs:
        """Per stage: on a known device in whole microseconds, as ``megatron-ext plan`` has them;
        of FLOPs alone in 64ths of the mean pass. Equal costs for a model that cannot be described.
        """
        return self._made(stages)[0]

    def exchange(self, stages: int) -> list[Fraction]:
        """Share of every stage's F that is communication between experts on several ranks; B has
        as much of it. Assumed where the device's links are not known."""
        gpu = None if self.reason or self.job is None else gpu_called(self.device)
        if gpu is None or self.job is None:
            return [_EXCHANGE] * stages
        return exchange_shares(self.job, self.splits(stages), gpu)

    def text(self, stages: int) -> str:
        """What an order of so many stages is made for, in one line for the log."""
        costs, basis = self._made(stages)
        if costs.stages is None:
            return basis
        numbers = [",".join(str(number_to_json(x)) for x in row) for row in costs.stages]
        parts = []
        for row, run in groupby(enumerate(numbers), key=lambda one: one[1]):
            first, *others = (stage for stage, _ in run)
            which = f"stages {first} to {others[-1]}" if others else f"stage {first}"
            parts.append(f"{which} {row}")
        return f"{basis}: F,B,W of {'; '.join(parts)}; hop {number_to_json(costs.hop)}"

    def _made(self, stages: int) -> tuple[Costs, str]:
        """The costs, and what they are."""
        try:
            if self.job is None:
                raise PlanError(self.reason)
            split = self.splits(stages)
            if sum(split.counts) != self.job.num_layers:
                raise PlanError(
                    f"its stages have {sum(split.counts)} layers, its flags {self.job.num_layers}"
                )
        except ValueError as error:
            return Costs(), f"equal costs (the model cannot be estimated: {error})"
        gpu = None if self.reason else gpu_called(self.device)
        if gpu is None:
            why = self.reason or f"no rates of the device {self.device!r} are known"
            shard = vocabulary_times(self.job, _FLOPS)
            costs = costs_in_parts(stage_times(self.job, split, _FLOPS), 0.0, shard)
            return costs, f"FLOPs ({why}), in 64ths of the mean pass"
        shard = vocabulary_times(self.job, gpu)
        costs = costs_in_us(stage_times(self.job, split, gpu), hop_time(self.job, gpu), shard)
        return costs, f"times estimated for {gpu.name} ({self.device}), in microseconds"


# Of a rank's mean pass: S, T, E and G of a model that cannot be estimated, without latency.
_SHARES = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 100), Fraction(1, 100), Fraction(0))


def with_shard(costs: Costs, estimate: Estimate | None, pp: int, stages: int) -> Costs:
    """``costs`` with times of vocabulary passes: as long beside the other passes as estimated."""
    if costs.vocabulary is not None:
        return costs
    own = None if estimate is None else estimate.costs(stages)
    if own is None or own.vocabulary is None:
        return costs.with_vocabulary([_mean_pass(costs, pp) * share for share in _SHARES])
    scale = _mean_pass(costs, pp) / _mean_pass(own, pp)
    return costs.with_vocabulary([time * scale for time in own.vocabulary])


def _mean_pass(costs: Costs, pp: int) -> Fraction:
    if costs.stages is None:
        total, ranks = costs.forward + costs.backward_input + costs.backward_weight, 1
    else:
        total, ranks = sum((time for row in costs.stages for time in row), Fraction(0)), pp
    return total / (3 * ranks)


def paired(costs: Costs, estimate: Estimate | None, stages: int, pp: int) -> Costs:
    """``costs`` with communication between experts, in the estimated share of F."""
    shares = [_EXCHANGE] * stages if estimate is None else estimate.exchange(stages)
    return with_exchange(costs, shares, pp)
