"""Costs that an order is made for until passes are measured: the model's FLOPs."""

from __future__ import annotations

from fractions import Fraction
from math import inf

from ..schedule.costs import Costs
from .gpu import Gpu
from .layout import Split
from .model import Job
from .times import costs_in_parts, stage_times, vocabulary_times, with_exchange

# With one FLOP/s and no other limit a pass takes as many seconds as it has FLOPs.
_FLOPS = Gpu("", 1.0, 0, inf, inf, inf, inf, inf, efficiency=1.0)

_EXCHANGE = Fraction(1, 3)  # of F, in models with experts on several ranks
# Of a rank's mean pass: S, T, E and G of a model that is not described, without latency.
_SHARES = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 100), Fraction(1, 100), Fraction(0))


def flop_costs(job: Job, split: Split) -> Costs:
    """Costs in the ratios of the FLOPs of ``job``'s stages, in 64ths of the mean pass.

    No device changes these ratios. They know neither memory traffic nor links, so a hop is 0.
    """
    return costs_in_parts(stage_times(job, split, _FLOPS), 0.0, vocabulary_times(job, _FLOPS))


def with_shard(costs: Costs, flops: Costs, pp: int) -> Costs:
    """``costs`` with times of vocabulary passes, in their ratio to the others in ``flops``."""
    if costs.vocabulary is not None:
        return costs
    if flops.vocabulary is None:
        return costs.with_vocabulary([_mean_pass(costs, pp) * share for share in _SHARES])
    scale = _mean_pass(costs, pp) / _mean_pass(flops, pp)
    return costs.with_vocabulary([time * scale for time in flops.vocabulary])


def _mean_pass(costs: Costs, pp: int) -> Fraction:
    if costs.stages is None:
        total, ranks = costs.forward + costs.backward_input + costs.backward_weight, 1
    else:
        total, ranks = sum((time for row in costs.stages for time in row), Fraction(0)), pp
    return total / (3 * ranks)


def paired(costs: Costs, stages: int, pp: int) -> Costs:
    """``costs`` with communication between experts, a third of F."""
    return with_exchange(costs, [_EXCHANGE] * stages, pp)
