"""Grids of parameters: a fixed sample in a plain run, all points in tier ``matrix``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Small, odd, even and prime numbers of ranks, and those that real pipelines have.
RANKS = (2, 3, 4, 7, 8)


def sampled(values: Iterable[Any], default: Collection[Any] = RANKS) -> list[Any]:
    """Parameters of ``pytest.mark.parametrize``, of which a plain run takes those in ``default``.

    Args:
        values: the whole grid; every point of it runs with ``--all`` or ``-m matrix``.
        default: points of a plain run; each must be one of ``values``.
    """
    values = list(values)
    unknown = [value for value in default if value not in values]
    assert default is RANKS or not unknown, f"{unknown} are no points of {values}"
    return [
        value if value in default else pytest.param(value, marks=pytest.mark.matrix)
        for value in values
    ]
