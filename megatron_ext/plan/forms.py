"""Numbers of a job that hold for every schedule: times of a mean layer and of the ends, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Placement
from .activations import SetBytes, stage_set, with_shard
from .collectives import ATTENTION, Links, overhead
from .layout import Split, Stage
from .memory import StageBytes
from .model import Job
from .parameters import Count, StateBytes, shard_parameters, stage_parameters, state_bytes
from .space import SearchSpace
from .times import PassTimes, exchange_times, stage_times, vocabulary_times


@dataclass(frozen=True)
class Forms:
    """Numbers of a job, whatever the schedule.

    Attributes:
        first, layer, last: seconds of one microbatch: of the embedding, a mean layer, the loss.
        shard: of a rank's shard of the vocabulary.
        beside: seconds of an iteration beside its passes.
        states, sets: bytes of an equal part for every rank; sets of one microbatch.
        passing: bytes of a running pass.
    """

    space: SearchSpace
    job: Job
    microbatches: int
    first: float
    layer: float
    last: float
    shard: float
    beside: float
    states: int
    sets: float
    passing: int

    def heaviest(self, placement: Placement) -> float | None:
        """Seconds of a microbatch on the rank with most work, under the best split that is
        allowed; None: there is none."""
        job, pp, layers, each = self.job, self.space.pp, self.job.num_layers, self.layer
        loads = [self.first] + [0.0] * (pp - 1)
        loads[placement.rank_of(placement.num_stages - 1)] += self.last
        if job.stages_are_given or not self.space.balance:
            split = self.space.even(job, placement)
            if split is None:
                return None
            counts = [sum(split.counts[s] for s in row) for row in placement.stages]
            return self.shard + max(load + each * n for load, n in zip(loads, counts))
        level = (sum(loads) + each * layers) / pp
        gone = [max(0, int((level - load) / each)) for load in loads]  # so much has each at least
        loads = [load + each * n for load, n in zip(loads, gone)]
        for _ in range(layers - sum(gone)):  # the rest to the lightest
            rank = min(range(pp), key=loads.__getitem__)
            loads[rank] += each
        return self.shard + max(loads)


def forms_of(
    space: SearchSpace, job: Job, microbatches: int, budget: float, limit: float
) -> Forms | None:
    """None if the states alone do not fit, or the work alone takes ``limit`` microseconds."""
    pp, layers, gpu = space.pp, job.num_layers, space.gpu
    split = Split((0, layers, 0))
    first, middle, last = stage_times(job, split, gpu)
    if job.overlap_moe_expert_parallel_comm:  # F and B of a pair hide each other's exchange
        sent, (f, b, w) = 2 * exchange_times(job, split, gpu)[1], middle
        share = max(f + b - sent, sent, f, b) / (f + b)
        middle = PassTimes(f * share, b * share, w)
    if microbatches * sum(middle) / pp * 1e6 >= limit:
        return None
    parts = _parts(job)
    count, states = Count(), StateBytes()
    for number, (own, kept, _) in parts:
        count += Count(number * own.dense, number * own.expert, number * own.other)
        states += StateBytes(
            number * kept.parameters, number * kept.gradients, number * kept.optimizer
        )
    passing = max(part.sets.recompute_bytes + part.sets.layer for _, part in parts)
    passing += max(part.sets.buffers for _, part in parts)
    if states.total // pp + passing > budget:
        return None
    one = StageBytes(
        Count(count.dense // pp, count.expert // pp, count.other // pp),
        StateBytes(states.parameters // pp, states.gradients // pp, states.optimizer // pp),
        parts[0][1].sets,
    )
    passes = [(middle[0] / pp, (middle[1] + middle[2]) / pp)]
    attention = [sum(any(kind in ATTENTION for kind in kinds) for kinds in job.layers) // pp]
    return Forms(
        *(space, job, microbatches, sum(first), sum(middle) / layers, sum(last)),
        sum((vocabulary_times(job, gpu) or (0.0,) * 5)[:4]),
        overhead(job, Links(gpu), [[one]], passes, attention, microbatches, space.overlap).total,
        states.total // pp,
        sum(number * part.sets.bytes_f_to_b for number, part in parts) / pp,
        passing,
    )


def _parts(job: Job) -> list[tuple[int, StageBytes]]:
    """How many of each: shards, the embedding, a layer of every kind, the end with the loss."""
    stages = [(1, Stage(range(0), first=True))]
    for kinds in sorted(set(job.layers)):
        number = job.layers.index(kinds)
        stages.append((job.layers.count(kinds), Stage(range(number, number + 1))))
    stages.append((1, Stage(range(0), last=True, predicts=True)))
    out = []
    if job.vocab_parallel:
        count = shard_parameters(job)
        sets = with_shard(job, SetBytes(0, 0))
        own = StageBytes(count, state_bytes(job, count), sets)
        out.append((job.pipeline_model_parallel_size, own))
    for number, stage in stages:
        count = stage_parameters(job, stage)
        out.append((number, StageBytes(count, state_bytes(job, count), stage_set(job, stage))))
    return out
