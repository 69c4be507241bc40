"""When the reduction of a chunk's gradients over data replicas starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


class Reductions:
    """Of one iteration on one rank.

    Chunks of later stages go first, as in stock, whichever chunk is done first: data replicas with
    another number of microbatches have another order, and would add gradients of another chunk.

    Args:
        config: the model's.
        models: chunks, with their wrappers.
        stages: of the chunks.
    """

    def __init__(self, config: Any, models: Sequence[Any], stages: Sequence[int]) -> None:
        self._config, self._models = config, models
        self._waiting = sorted(range(len(stages)), key=lambda chunk: -stages[chunk])
        self._done: set[int] = set()

    def done(self, chunk: int) -> None:
        """All passes with gradients of a chunk have run."""
        self._done.add(chunk)
        while self._waiting and self._waiting[0] in self._done:
            first = self._waiting.pop(0)
            start = self.start_of(first)
            if start is not None:
                start(self._models[first].parameters())

    def start_of(self, chunk: int) -> Callable[..., Any] | None:
        """What starts the reduction of a chunk; None: hooks of its parameters do, or it comes after
        all passes."""
        sync: Any = self._config.grad_sync_func
        if isinstance(sync, list):
            sync = sync[chunk]
        model = self._models[chunk]
        megatrons = getattr(model, "start_grad_sync", None)
        # Without a function that holds them back a trainer does so itself, or wants none reduced.
        held_back = self._config.no_sync_func is not None
        if sync is None and len(self._models) > 1 and held_back and _overlaps(model):
            # In which order parameters of several chunks get their gradients depends on the plan.
            sync = megatrons
        if sync is not None and sync == megatrons and hasattr(model, "bucket_groups"):
            return functools.partial(_start, model)
        found: Callable[..., Any] | None = sync
        return found


def _overlaps(model: Any) -> bool:
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))


def _start(model: Any, *unused: Any) -> None:
    """``DistributedDataParallel.start_grad_sync``, with two things that hooks of parameters keep.

    Megatron reduces what has never been started by hooks at the end of an iteration, unless that
    is on its way, which it does not know with several instances of the distributed optimizer: it
    would be reduced twice. And where gradients are saved, all of them are reduced on every rank.
    """
    several = getattr(model.ddp_config, "num_distributed_optimizer_instances", 1) > 1
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        if not (several and group.is_first_batch):
            group.start_grad_sync(force_all_reduce=model.force_all_reduce)
