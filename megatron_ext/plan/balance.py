"""Layer splits that even out the stages with the embedding and the output layer.

Both of them lie on rank 0 under V placement, and on the first and last rank otherwise. A rank with
them gets fewer layers, through Megatron's own ``--pipeline-model-parallel-layout``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule.placement import Placement
from .layout import Split


def balanced(
    placement: Placement,
    layers: int,
    each: Sequence[float],
    first: float,
    last: float,
) -> Split | None:
    """The split whose heaviest rank is lightest, if all layers cost the same.

    Layer by layer goes to the rank that is lightest with it, on it to the stage that is; for equal
    layers no other way ends with a lighter heaviest rank. Every stage has a layer, except that the
    first and the last may have none.

    Args:
        each: per rank, the cost of a layer there (seconds, or bytes with all sets in flight).
        first, last: cost of the embedding, and of the output layer with the loss.

    Returns:
        None if there are too few layers.
    """
    stages = placement.num_stages
    counts = [0] + [1] * (stages - 2) + [0]
    left = layers - sum(counts)
    if left < 0:
        return None
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    ranks = [placement.rank_of(stage) for stage in range(stages)]
    loads = [0.0] * placement.pp
    for stage, rank in enumerate(ranks):
        loads[rank] += extra[stage] + counts[stage] * each[rank]
    for _ in range(left):
        # Equally light: the later rank, whose activations stay for a shorter time.
        rank = min(range(placement.pp), key=lambda r: (loads[r] + each[r], -r))
        stage = min(placement.stages[rank], key=lambda s: (extra[s] + counts[s] * each[rank], s))
        counts[stage] += 1
        loads[rank] += each[rank]
    return Split(tuple(counts))
