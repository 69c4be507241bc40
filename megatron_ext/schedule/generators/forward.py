"""Forward-only order, for evaluation."""

from __future__ import annotations

from ..actions import Action, Op
from ..placement import Placement
from ..schedule import Schedule


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """F of every stage and microbatch, each as early as possible at equal costs.

    Of the passes that can run, a rank takes the latest stage, then the first microbatch: work in
    flight is finished before new work is begun.

    Raises:
        ValueError: fewer than one microbatch.
    """
    if microbatches < 1:
        raise ValueError(f"forward-only needs at least 1 microbatch, got {microbatches}")
    n = placement.num_stages
    following = [0] * n  # next microbatch of each stage
    ranks: list[list[Action]] = [[] for _ in range(placement.pp)]
    left = n * microbatches
    while left:
        # One unit of time: every rank picks from what was finished before it.
        done = list(following)
        for rank, row in enumerate(placement.stages):
            for stage in reversed(row):
                j = following[stage]
                if j < microbatches and (stage == 0 or j < done[stage - 1]):
                    ranks[rank].append(Action(Op.F, stage, j))
                    following[stage] = j + 1
                    left -= 1
                    break
    return Schedule("forward-only", placement, microbatches, tuple(tuple(r) for r in ranks))
