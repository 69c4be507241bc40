"""Prelude of a training script: its loss is not linear in the losses of tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


def prepare(value: Any, rank: int, folder: Path) -> None:
    """See ``ScriptServer.run``."""
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step: Any, *args: Any, **kwargs: Any) -> Any:
        def step(*given: Any) -> Any:
            output, loss_function = forward_step(*given)
            return output, lambda losses: loss_function((losses - 2) ** 2)

        return original(step, *args, **kwargs)

    training.train_step = train_step
