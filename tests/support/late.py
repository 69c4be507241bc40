"""A prelude of recorded ranks whose messages and copies are late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import races, recorded


def prepare(value: Any, rank: int, folder: Path) -> None:
    """As of ``recorded.prepare``."""
    races.install(rank)
    recorded.prepare(value, rank, folder)
