"""Grids of parameters: a fixed sample in a plain run, all points in tier ``matrix``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Small, odd, even and prime numbers of ranks, and one that real pipelines have.
RANKS = (2, 3, 4, 7, 8)
# A schedule of each placement, with W passes and without.
KINDS = ("1f1b", "zb-h1", "interleaved", "interleaved-zb", "v-half", "dualpipev")


def sampled(values: Iterable[Any], default: Collection[Any] = RANKS) -> list[Any]:
    """Parameters of ``pytest.mark.parametrize``, of which a plain run takes those in ``default``.

    Args:
        values: the whole grid, which runs with ``--all``; a tuple holds several arguments.
        default: the points of a plain run.
    """
    values = list(values)
    # RANKS serves grids that begin later or end earlier; another sample is of its own grid.
    assert default is RANKS or all(value in values for value in default), default
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in default else pytest.mark.matrix,
        )
        for value in values
    ]
