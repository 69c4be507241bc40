"""How long passes and messages really take, agreed on by the ranks of a pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from ..schedule.actions import Op
from ..schedule.costs import Costs
from ..schedule.placement import Placement

# Seconds of F, B and W, by chunk of this rank and operation.
Seconds = Mapping[tuple[int, Op], float]
# One pass: (chunk, operation, microbatch, seconds).
Duration = tuple[int, Op, int, float]

# Costs are whole numbers of this part of the mean pass: finer is noise, and plans need small ones.
_GRAIN = 64


class Timing:
    """Collects the times of the first training steps.

    Args:
        steps: how many of them; 0: none.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._durations: list[Duration] = []

    @property
    def active(self) -> bool:
        """True if the step that comes is to be timed."""
        return self._left > 0

    def add(self, durations: Sequence[Duration]) -> bool:
        """Take a step's passes; True if it was the last one."""
        self._durations += durations
        self._left -= 1
        return self._left == 0

    def take(self) -> list[Duration]:
        """All passes, once."""
        durations, self._durations = self._durations, []
        return durations


def pass_seconds(
    durations: Sequence[Duration], of: Callable[[Sequence[float]], float] = statistics.median
) -> dict[tuple[int, Op], float]:
    """What F, B and W of each chunk take.

    The first microbatch of a step does not count if there are others: its passes also load kernels.
    A BW counts half to each.

    Args:
        durations: (chunk, operation, microbatch, seconds).
        of: the number that stands for a pass's times.
    """
    every: dict[tuple[int, Op], list[float]] = {}
    last = max((microbatch for _, _, microbatch, _ in durations), default=0)
    for chunk, op, microbatch, seconds in durations:
        if microbatch == 0 and last > 0:
            continue
        for part in (Op.B, Op.W) if op is Op.BW else (op,):
            every.setdefault((chunk, part), []).append(seconds / (2 if op is Op.BW else 1))
    return {key: of(times) for key, times in every.items()}


def costs(
    placement: Placement, rank: int, seconds: Seconds, group: Any, hop_seconds: float = 0.0
) -> Costs:
    """The measured times of all stages' passes; all ranks of ``group`` call this together.

    Args:
        placement: of the stages.
        rank: this one's, in the pipeline.
        seconds: of this rank's passes.
        group: the pipeline's process group.
        hop_seconds: of a message between neighbours; the largest of all ranks counts.

    Returns:
        Costs in units of 1/64 of the mean pass, the same on all ranks.
    """
    mine = {
        stage: [seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W)]
        for chunk, stage in enumerate(placement.stages[rank])
    }
    stages: dict[int, list[float]] = {}
    hop = 0.0
    for part, its_hop in gather((mine, hop_seconds), group):
        stages.update(part)
        hop = max(hop, its_hop)
    rows = [stages[stage] for stage in range(placement.num_stages)]
    mean = sum(map(sum, rows)) / (3 * len(rows)) or 1.0
    ticks = [[max(1, round(_GRAIN * x / mean)) for x in row] for row in rows]
    return Costs.of(hop=Fraction(round(_GRAIN * hop / mean)), stages=ticks)


def hop_seconds(
    shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device, group: Any
) -> float:
    """One way of a message to the next rank, half of the best of five round trips.

    All ranks of ``group`` call this together. 0 where shapes vary.
    """
    if shape is None:
        return 0.0
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    message = torch.zeros(shape, dtype=dtype, device=device)
    best = float("inf")
    for turn in (0, 1):  # pairs (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...
        first = rank % 2 == turn
        peer = rank + 1 if first else rank - 1
        dist.barrier(group)
        for _ in range(6 if 0 <= peer < size else 0):
            started = time.perf_counter()
            if first:
                dist.send(message, ranks[peer], group)
                dist.recv(message, ranks[peer], group)
            else:
                dist.recv(message, ranks[peer], group)
                dist.send(message, ranks[peer], group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if first:
                best = min(best, (time.perf_counter() - started) / 2)
    dist.barrier(group)
    return best if best < float("inf") else 0.0


def gather(value: Any, group: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, value, group=group)
    return every
