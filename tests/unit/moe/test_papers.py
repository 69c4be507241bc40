"""Formulas that MPipeMoE and MPMoE publish."""

from __future__ import annotations

import pytest

from benchmarks.papers.compare import savings


@pytest.mark.parametrize(
    ("sizes", "pipelined", "sequential"),
    [
        ((2048, 8192, 64, 8192), (16.6, 33.3, 41.6), (4.8, 23.8, 33.3)),
        ((768, 3072, 64, 32768), (23.9, 47.7, 59.7), None),
    ],
)
def test_the_papers_savings(sizes: tuple[int, ...], pipelined: object, sequential: object) -> None:
    """Two of table III's models, n = 2, 4, 8, against both baselines, in per cent."""
    found = [[round(100 * share, 1) for share in savings(*sizes, n)] for n in (2, 4, 8)]
    phi, other = zip(*found)
    assert phi == pipelined
    assert sequential in (None, other)


def test_a_pipelined_layer_without_reuse_needs_more() -> None:
    """16 B*M where the layer that is not pipelined has 13, for many tokens."""
    assert savings(64, 256, 1, 10**9, 1) == pytest.approx((0, -3 / 13), abs=1e-6)
