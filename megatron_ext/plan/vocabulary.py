"""Whether a job's vocabulary may be sharded over its pipeline, and what that changes in a search.

``--pp-vocab-parallel`` (arXiv 2411.05288): embedding and output layer in equal parts on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..schedule import Costs, Placement, Schedule
from ..schedule.effects import peak_sets
from ..schedule.vocabulary import AHEAD
from .layout import read_layout
from .memory import RankBytes, StageBytes
from .model import Job
from .parameters import shard_parameters, state_bytes

BARRIERS = 1  # training runs algorithm 2 of the paper
NOT_WITH = ("dualpipev",)  # its joint passes leave no place for passes of the vocabulary


def _may_shard(job: Job) -> bool:
    """True if training shards the job's vocabulary."""
    ranks = job.tensor_model_parallel_size * job.pipeline_model_parallel_size
    if job.padded_vocab_size % ranks or job.overlap_moe_expert_parallel_comm:
        return False
    # Hidden states of multi-token prediction come from the last stage.
    layout = job.layout if job.mtp_layers else None
    return layout is None or read_layout(layout, job.num_layers).predicts == -1


def settings(job: Job, *, choose: bool) -> tuple[bool, ...]:
    """Which of without and with a sharded vocabulary a search tries; what a job asks for is kept.

    Args:
        choose: try both, as far as training allows; not with measured passes, which are of one.
    """
    if job.vocab_parallel:
        return (True,)
    return (False, True) if choose and _may_shard(job) else (False,)


def shard_states(job: Job) -> int:
    """Bytes of a shard's parameters, gradients and optimizer states; 0: it is not sharded."""
    return state_bytes(job, shard_parameters(job)).total


def rank_work(costs: Costs, placement: Placement) -> list[Fraction]:
    """Of one microbatch on each rank, with the passes of the vocabulary, in the costs' units."""
    *passes, _ = costs.vocabulary or (Fraction(0),) * 5
    return [work + sum(passes) for work in costs.per_rank_work(placement)]


def with_passes(
    ranks: Sequence[RankBytes], stages: Sequence[StageBytes], order: Schedule, microbatches: int
) -> list[int]:
    """Likely bytes of each rank at its peak, from those of an order without vocabulary passes.

    Every rank keeps a microbatch more (arXiv 2411.05288, section 5), and scores of ``_SCORED``; the
    last stage's rank the depths' embeddings, or their gradient, of what the first stage has begun.

    Args:
        ranks: their bytes under ``order``.
        stages: bytes of every stage.
        order: without vocabulary passes.
        microbatches: of one iteration; no more can be kept.
    """
    out = []
    if not any(stage.sets.shard or stage.sets.waiting for stage in stages):
        return [rank.total for rank in ranks]
    rows, most = order.placement.stages, peak_sets(order.ranks)
    begun = min(microbatches, -(-most[order.placement.rank_of(0)] // len(rows[0])) + AHEAD + 1)
    for rank, row, held in zip(ranks, rows, most):
        first = stages[row[0]].sets
        more = held < microbatches * len(row)
        sets = sum(stages[s].sets.bytes_f_to_b for s in row) if more and first.shard else 0
        waiting = begun * max(stages[s].sets.waiting for s in row)
        out.append(rank.total + sets + _SCORED * first.shard + waiting)
    return out


_SCORED = 3  # microbatches between S and T, likely
