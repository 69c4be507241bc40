"""Transformer Engine's own linear modules as B and W on a GPU: bit for bit as fused.

pytest tests/gpu -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

SHAPE = (64, 128)


@pytest.fixture(scope="module")
def te() -> Any:
    """Transformer Engine's PyTorch part; a broken installation raises more than ImportError."""
    try:
        import transformer_engine.pytorch as module
    except Exception as error:
        pytest.skip(f"needs Transformer Engine >= 2.3: {error}")
    return module


@pytest.fixture(scope="module")
def checks() -> Any:
    """The same body that the stand-ins run on a CPU."""
    from tests.megatron.cases import te_checks

    return te_checks


def _input(microbatch: int) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(microbatch)
    x = torch.randn(SHAPE, generator=generator, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(True)


def _loss(y: Any) -> Any:
    if isinstance(y, tuple):
        bias = y[1] if not isinstance(y[1], (list, tuple)) else sum(y[1])
        y = y[0].square() + bias
    return y.float().square().sum()


def _more(bias: str, fused: bool) -> dict[str, Any]:
    import torch

    return {
        "bias": bias != "none",
        "return_bias": bias == "outside",
        "fuse_wgrad_accumulation": fused,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w", "outside"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_linear(te: Any, checks: Any, kind: str, bias: str, fused: bool) -> None:
    module = getattr(te, kind)(128, 96, **_more(bias, fused))
    checks.split_equals_fused(module, lambda m, i: _loss(m(_input(i))))


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w"])
def test_grouped_with_idle_experts(te: Any, checks: Any, bias: str, fused: bool) -> None:
    splits = ([16, 0, 48], [0, 0, 64], [32, 32, 0], [16, 16, 32])
    module = te.GroupedLinear(3, 128, 96, **_more(bias, fused))
    checks.split_equals_fused(module, lambda m, i: _loss(m(_input(i), splits[i])))


def test_linear_in_fp8(te: Any, checks: Any) -> None:
    """The bias gradient comes in B then; each microbatch has its own scales, so recipes without
    history keep the two runs equal."""
    import contextlib

    from transformer_engine.common import recipe

    with contextlib.suppress(Exception):
        available, reason = te.fp8.check_fp8_support()
        if not available:
            pytest.skip(reason)

    def run(module: Any, microbatch: int) -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe.Float8CurrentScaling()):
            y = module(_input(microbatch))
        return _loss(y)

    checks.split_equals_fused(te.Linear(128, 96, **_more("in-w", False)), run)
