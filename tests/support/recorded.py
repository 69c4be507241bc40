"""A prelude of ranks that write down gradients and weights; also as one process runs slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.integration.features.slices.wanted import Wanted
from megatron_ext.prove import recorder


def prepare(value: Any, rank: int, folder: Path) -> None:
    """Record this rank's training into ``folder``.

    Args:
        value: slices of a sequence, as ``Wanted`` takes them, that one process runs without flags
            of ours; None: none.
    """
    if value is not None:
        from megatron_ext.integration.versions import megatron_version
        from tests.support import one_process

        one_process.install(Wanted(*value), megatron_version())
    recorder.record(rank, folder)
