"""A prelude of recorded ranks: mock documents of 1 to 8 tokens, in place of 1 to 4095."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def prepare(value: Any, rank: int, folder: Path) -> None:
    """As of ``recorded.prepare``, which it calls."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from tests.support import recorded

    MockGPTLowLevelDataset.max_sequence_length = 9
    recorded.prepare(value, rank, folder)
