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
from .model import Job, PlanError
from .parameters import shard_parameters, state_bytes

BARRIERS = 1  # training runs algorithm 2 of the paper
NOT_WITH = ("dualpipev",)  # its joint passes leave no place for passes of the vocabulary


def refusal(job: Job) -> str | None:
    """Why training refuses ``--pp-vocab-parallel`` for this job; None: it does not."""
    ranks = job.tensor_model_parallel_size * job.pipeline_model_parallel_size
    if job.padded_vocab_size % ranks:
        return (
            f"the padded vocabulary {job.padded_vocab_size} cannot be divided by {ranks} ranks; "
            f"give --make-vocab-size-divisible-by {job.pipeline_model_parallel_size} or a multiple"
        )
    for given, flag in (
        (job.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm"),
        (job.hybrid, "--hybrid-layer-pattern"),
    ):
        if given:
            return f"it does not support {flag}; drop one of them"
    if job.mtp_layers and job.layout and read_layout(job.layout, job.num_layers).predicts != -1:
        return (
            "it takes the hidden states of multi-token prediction from the last stage, but "
            f"--pipeline-model-parallel-layout {job.layout} has it (m) before; put it there"
        )
    return None


def refuse(job: Job) -> None:
    """Raise for a job that asks for what ``refusal`` names.

    Raises:
        PlanError: with the numbers or the flag, and the fix.
    """
    why = refusal(job) if job.vocab_parallel else None
    if why is not None:
        raise PlanError(f"--pp-vocab-parallel: {why}")


def settings(job: Job, *, choose: bool) -> tuple[bool, ...]:
    """Which of without and with a sharded vocabulary a search tries; what a job asks for is kept.

    Args:
        choose: try both, as far as training allows; not with measured passes, which are of one.
    """
    if job.vocab_parallel:
        return (True,)
    return (False, True) if choose and refusal(job) is None else (False,)


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
