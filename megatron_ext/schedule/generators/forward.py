"""Forward-only order, for evaluation."""

from __future__ import annotations

from ..actions import Action, Op
from ..effects import inputs
from ..placement import Placement
from ..schedule import Schedule
from ..vocabulary import AHEAD, E, S, Vocabulary, VocabularyOp


def forward_only(placement: Placement, microbatches: int, barriers: int = 0) -> Schedule:
    """F of every stage and microbatch, each as early as possible at equal costs.

    Of the passes that can run, a rank takes the latest stage, then the first microbatch: work in
    flight is finished before new work is begun.

    Args:
        placement: rank and chunk of every stage.
        microbatches: m, >= 1.
        barriers: of a training schedule with a sharded vocabulary: all ranks have E two
            microbatches ahead of stage 0, and S one pass behind the last stage's F, so that what
            it waits for has that time. 0: the vocabulary is not sharded.

    Raises:
        ValueError: fewer than one microbatch.
    """
    if microbatches < 1:
        raise ValueError(f"forward-only needs at least 1 microbatch, got {microbatches}")
    n = placement.num_stages
    following = [0] * n  # next microbatch of each stage
    ranks: list[list[Action]] = [[] for _ in range(placement.pp)]
    left = n * microbatches
    shared = Vocabulary(placement, training=False) if barriers else None
    begun: dict[VocabularyOp, int] = {E: 0, S: 0}

    def every_rank(op: VocabularyOp, until: int) -> None:
        """``op`` of the microbatches before ``until`` that have none yet."""
        if shared is not None:
            for microbatch in range(begun[op], min(until, microbatches)):
                for row, action in zip(ranks, shared.actions(op, microbatch)):
                    row.append(action)
            begun[op] = max(begun[op], until)

    while left:
        # One unit of time: every rank picks from what was finished before it.
        done = list(following)
        every_rank(E, done[0] + 1 + AHEAD)
        for rank, row in enumerate(placement.stages):
            for stage in reversed(row):
                j = following[stage]
                needs = inputs(Op.F, stage, n)
                if j < microbatches and all(j < done[other] for _, other in needs):
                    ranks[rank].append(Action(Op.F, stage, j))
                    following[stage] = j + 1
                    left -= 1
                    break
        every_rank(S, done[-1])
    every_rank(S, microbatches)
    lists = tuple(tuple(row) for row in ranks)
    return Schedule("forward-only", placement, microbatches, lists, barriers=barriers)
