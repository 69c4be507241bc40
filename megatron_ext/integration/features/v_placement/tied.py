"""Tied word embeddings under V placement: rank 0 has both copies, and both must be loaded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...hooks import Hook
from ...targets import BRIDGE_EMBEDDINGS
from ...utils import tied_embeddings, unwrapped
from .roles import pp_rank


def _broadcast_shared_embeddings(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def broadcast_shared_embeddings(self: Any, megatron_model: Any) -> None:
        # The original has the embedding on one rank and the output layer on another; here it
        # would fill rank 0's output layer from memory that nobody has written.
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        found = tied_embeddings(pp_rank(), [unwrapped(model) for model in models])
        if found is not None:
            found[1].data.copy_(found[0].data)

    return broadcast_shared_embeddings


class TiedCopies(Callback):
    """Loads both copies where a trainer's loader is known, and refuses to train where they differ:
    their gradients are added, so they would stay apart."""

    def __init__(self) -> None:
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()

    def hooks(self) -> Sequence[Hook]:
        if not BRIDGE_EMBEDDINGS.loaded:
            return ()
        return (
            Hook(
                BRIDGE_EMBEDDINGS,
                _broadcast_shared_embeddings,
                "the output layer of a model with tied embeddings would not be loaded",
            ),
        )

    def begin(self, step: Step) -> None:
        chunks = [unwrapped(model) for model in step.call.iteration.models]
        if chunks[0] in self._checked:
            return
        self._checked.add(chunks[0])
        found = tied_embeddings(pp_rank(), chunks)
        if found is not None and not torch.equal(*found):
            raise ConfigError(
                f"--pp-schedule {step.plan.name} has both copies of the tied word embeddings on "
                "one rank, but they differ: whatever loaded the weights filled one of them; load "
                "a torch_dist checkpoint, or use a schedule with Megatron's own placement, e.g. "
                "zb-h1"
            )
