"""A prelude of recorded ranks: slices without the hooks that need the whole microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def prepare(value: Any, rank: int, folder: Path) -> None:
    """As of ``recorded.prepare``, which it calls."""
    from megatron_ext.integration import hooks
    from megatron_ext.integration.features.slices import prediction, routers
    from tests.support import recorded

    for place in [*hooks._HOOKED]:
        if place[0] in (prediction.__name__, routers.__name__):
            del hooks._HOOKED[place]
    recorded.prepare(value, rank, folder)
