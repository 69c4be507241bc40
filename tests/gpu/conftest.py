"""Skips everything here where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest


def _reason() -> str | None:
    try:
        import torch
    except ImportError:
        return "needs torch"
    return None if torch.cuda.is_available() else "needs a CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only this folder's tests; the hook sees all."""
    reason = _reason()
    for item in items:
        if Path(__file__).parent in item.path.parents and reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
