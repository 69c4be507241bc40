"""Closed forms of one division, microbatch size and recompute: what no order can beat.

A *case* is a job with all of them and a kind of placement. No order is faster than its heaviest
rank's share of the work under the best split of the layers, with what an iteration does beside its
passes; no rank has fewer bytes than its share of the states. Nothing here makes an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .activations import SetBytes, stage_set, with_shard
from .collectives import ATTENTION, Links, overhead
from .layout import Split, Stage
from .memory import StageBytes
from .model import Job
from .parameters import Count, StateBytes, shard_parameters, stage_parameters, state_bytes
from .space import SearchSpace
from .times import PassTimes, least_times, vocabulary_times


class Case(NamedTuple):
    """What is known before any order is made.

    Attributes:
        space: of the division.
        job: with its microbatch size, recompute and vocabulary.
        microbatches: of one iteration on one data-parallel rank.
        vee: of schedules in V placement; else of all others.
        bound_us: no order is faster, with what is beside the passes.
        beside_us: least beside the passes.
        likely_us: with the idle time of the schedules that likely fit.
        states: a rank's share of parameters, gradients and optimizer states, in bytes.
        least: states, and the activations of a schedule with little memory, roughly.
    """

    space: SearchSpace
    job: Job
    microbatches: int
    vee: bool
    bound_us: float
    beside_us: float
    likely_us: float
    states: int
    least: int


def cases(space: SearchSpace, budget: int) -> list[Case]:
    """Every case of a division; none without a pipeline.

    Args:
        budget: bytes a rank, by which the likely schedule is chosen.
    """
    out = []
    placements = {spec.placement.is_vee() for spec in space.specs()}
    placements |= {True} if "v-cap" in space.schedules else set()
    for job, microbatches in space.jobs():
        forms = _Forms(space, job, microbatches)
        out += [forms.case(vee, budget) for vee in sorted(placements)]
    return out


class _Forms:
    """Closed forms of one job: what does not depend on the placement is computed once."""

    def __init__(self, space: SearchSpace, job: Job, microbatches: int) -> None:
        self.space, self.job, self.microbatches = space, job, microbatches
        self.pp, layers = space.pp, job.num_layers
        split = Split((0, layers, 0))
        times = self.least(split)
        self.first, self.middle, self.last = map(sum, times)
        self.shard = sum((vocabulary_times(job, space.gpu) or (0.0,) * 5)[:4])
        self.forward = sum(row[0] for row in times) / self.pp
        self.parts = _pieces(job)
        self.count, self.states = _share(self.parts, self.pp)

    def least(self, split: Split) -> Sequence[PassTimes]:
        """Of every stage, without what pairs may hide."""
        return least_times(self.job, split, self.space.gpu)

    def case(self, vee: bool, budget: int) -> Case:
        """One placement's."""
        work = self.heaviest(vee)
        job, space, pp, m = self.job, self.space, self.pp, self.microbatches
        one = StageBytes(self.count, self.states, self.parts[0][1].sets)
        attention = sum(any(kind in ATTENTION for kind in kinds) for kinds in job.layers)
        links = Links(space.gpu)
        passes = [(self.forward, max(0.0, work - self.forward))]
        beside = overhead(job, links, [[one]], passes, [attention // pp], m, space.overlap).total
        sets = sum(number * part.sets.bytes_f_to_b for number, part in self.parts)
        passing = max(part.sets.recompute_bytes + part.sets.layer for _, part in self.parts)
        room = (budget - self.states.total - passing) / max(1, sets)
        idle = next((idle for least, idle in _IDLE if room >= least), _NO_ROOM) * (pp - 1)
        # Costs are whole microseconds.
        bound = (m * work + beside) * 1e6 * ROUNDING
        return Case(
            *(space, job, m, vee, bound, beside * 1e6 * ROUNDING),
            bound + idle * self.forward * 1e6,
            self.states.total,
            self.states.total + passing + sets * (pp + 4) // (3 * pp),
        )

    def heaviest(self, vee: bool) -> float:
        """Least seconds of one microbatch on the rank with most work, whatever the split."""
        job, space, pp, layers = self.job, self.space, self.pp, self.job.num_layers
        if job.stages_are_given or not space.balance:
            return self.shard + min(self._of_split(vee), default=0.0)
        each = self.middle / layers
        total = self.first + self.middle + self.last
        least = max(total / pp, self.first, self.last)
        if len(set(job.layers)) > 1:
            return self.shard + least
        # Whole layers: the least load under which the ranks have room for all of them.
        ends = [self.first + self.last] if vee else [self.first, self.last]
        ends += [0.0] * (pp - len(ends))
        loads = sorted({end + n * each for end in set(ends) for n in range(layers + 1)})
        for load in loads:
            room = sum(int((load - end) / each + 1e-6) for end in ends if load >= end)
            if load >= max(ends) and room >= layers:
                return self.shard + load
        return self.shard + least

    def _of_split(self, vee: bool) -> Iterable[float]:
        """Of every number of chunks, the heaviest rank under the split that the flags ask for."""
        job, space = self.job, self.space
        for placement in {
            spec.placement.chunks: spec.placement
            for spec in space.specs()
            if spec.placement.is_vee() == vee
        }.values():
            split = space.even(job, placement)
            if split is None:
                continue
            times = [sum(row) for row in self.least(split)]
            yield max(sum(times[s] for s in row) for row in placement.stages)


def _pieces(job: Job) -> list[tuple[int, StageBytes]]:
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


def _share(parts: Sequence[tuple[int, StageBytes]], pp: int) -> tuple[Count, StateBytes]:
    """An equal part of all of them for every pipeline rank."""
    total, states = Count(), StateBytes()
    for number, (count, each, _) in parts:
        total += Count(number * count.dense, number * count.expert, number * count.other)
        states += StateBytes(
            number * each.parameters, number * each.gradients, number * each.optimizer
        )
    return (
        Count(total.dense // pp, total.expert // pp, total.other // pp),
        StateBytes(states.parameters // pp, states.gradients // pp, states.optimizer // pp),
    )


# Idle time of a schedule, in forward passes of a rank for each pipeline rank but one, where it has
# room for this share of 1F1B's activations: V-ZB, V-Half, V-Min (arXiv 2405.15362, table 1).
_IDLE = ((1.0, 0.5), (0.55, 2.0), (0.4, 3.0))
_NO_ROOM = 6.0  # offload, or nothing
ROUNDING = 0.999
