"""A prelude of ``prove``'s ranks: slices without the hooks that need the whole microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def prepare(value: Any, rank: int, folder: Path) -> None:
    """As of ``recorder.prepare``, which it calls."""
    from megatron_ext.integration.features.slices.prediction import Prediction
    from megatron_ext.integration.features.slices.routers import Routers
    from megatron_ext.prove import recorder

    Routers.hooks = lambda self: ()  # type: ignore[method-assign]
    Prediction.hooks = lambda self: ()  # type: ignore[method-assign]
    recorder.prepare(value, rank, folder)
