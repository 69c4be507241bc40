"""Cheap recompute: what it keeps, byte for byte, and that no loss or gradient changes."""

from __future__ import annotations

import pytest

from tests.support.case_server import Cases, case_results
from tests.support.checkouts import OLDEST_TAG, version

# Of recompute_cases.py: tokens, hidden size, heads and length.
TOKENS, H, HEADS, S, B = 32, 64, 4, 16, 2
F = 4 * H
NORMS = 2 * H  # their outputs
# What a layer keeps either way: norms' inputs, Q, K, V and the attention's output.
REST = 2 * H + 3 * H + H

# kind -> numbers per token that the layer keeps without and with cheap recompute.
NUMBERS = {
    "gelu": (REST + NORMS + F + F, REST + F),  # 16 h and 10 h: 32 and 20 bytes of 16 bits
    "gelu fused": (REST + NORMS + F + F, REST + F),
    "gelu bf16": (REST + NORMS + F + F, REST + F),
    "swiglu fused": (REST + NORMS + 2 * F + F, REST + 2 * F),
    # Both factors of the product too.
    "swiglu": (REST + NORMS + 2 * F + 3 * F, REST + 2 * F),
    # Without recompute relu's output, with it relu's input.
    "squared relu": (REST + NORMS + F + F, REST + F),
    # Two masks, which a CPU keeps as numbers of full size, stay.
    "dropout": (REST + NORMS + F + F + 2 * H, REST + F + 2 * H),
    # Megatron recomputes the whole MLP.
    "mlp too": (REST + NORMS, REST),
}
KINDS = (*NUMBERS, "rmsnorm", "rmsnorm bf16", "experts", "frozen fc1")
# torch's RMSNorm is several operations on a CPU, two of whose gradients and the residual's are
# added up in another order where the norm is recomputed. In 16 bits they meet in one cast to fp32.
ROUNDED = "rmsnorm"


cases = case_results("megatron.cases.recompute_cases", "installed", version(OLDEST_TAG))


def local_attention_bytes(kind: str) -> int:
    """What the local implementation keeps beside theory, which takes flash attention for granted:
    the scores after softmax, with 16 bits those before the cast too, and the mask."""
    scores = B * HEADS * S * S
    return (scores * (2 + 4) if kind.endswith("bf16") else scores * 4) + S * S


@pytest.mark.parametrize("kind", NUMBERS)
def test_bytes_kept(cases: Cases, kind: str) -> None:
    """Distinct storages that autograd holds after a layer's forward pass, parameters apart."""
    size = 2 if kind.endswith("bf16") else 4
    # Mean and reciprocal deviation of both norms; computed again with the norms.
    statistics = 2 * 2 * TOKENS * 4
    kept, cheap = (numbers * TOKENS * size for numbers in NUMBERS[kind])
    attention = local_attention_bytes(kind)
    assert sum(cases[kind]["kept"].values()) == kept + statistics + attention, cases[kind]["kept"]
    assert sum(cases[kind]["cheap"].values()) == cheap + attention, cases[kind]["cheap"]


def test_bytes_of_experts(cases: Cases) -> None:
    """Two experts a token: of each, all but fc1's output (two factors, product, scaled product)."""
    saved = sum(cases["experts"]["kept"].values()) - sum(cases["experts"]["cheap"].values())
    assert saved == (NORMS + 2 * 4 * F) * TOKENS * 4 + 2 * 2 * TOKENS * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["fused", "split", "moved", "evaluation"])
def test_nothing_changes(cases: Cases, kind: str, way: str) -> None:
    """All gradients are bit for bit those without recompute, whenever W comes."""
    rounding = 1e-6 if kind == ROUNDED and way != "evaluation" else 0
    assert cases[kind][way] <= rounding
    assert cases[kind]["moved_bytes"] > 0
