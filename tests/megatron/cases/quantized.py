"""Experts in blockwise FP8 without a GPU, with the call contract of Transformer Engine's.

They quantize only inside ``autocast``, and compute in full precision outside of it, silently, as
Transformer Engine does; a GEMM takes rows in multiples of 16 only, and the experts pad to that
themselves, as TEGroupedMLP does. Rows and their gradients have a scale for each block of a row,
weight gradients for blocks of 16 rows. Sums are exact, so results depend on numbers alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.transformer.moe import moe_layer

BLOCK, ALIGNMENT = 8, 16


class State:
    """Transformer Engine's, as far as it is asked."""

    recipe: str | None = None
    entered = 0

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> str | None:
        return cls.recipe

    @staticmethod
    def get_fp8_group() -> None:
        return None


@contextlib.contextmanager
def autocast(*, enabled: bool, fp8_recipe: str, fp8_group: Any = None) -> Iterator[None]:
    """In force inside."""
    before, State.recipe = State.recipe, fp8_recipe if enabled else None
    State.entered += 1
    try:
        yield
    finally:
        State.recipe = before


def _te_checkpoint(run: Any, distribute: bool, tracker: Any, group: Any, *inputs: Any) -> Any:
    """Recomputes in the recipe of the forward pass, as Transformer Engine's does."""
    recipe = State.recipe
    assert recipe is not None and not distribute and callable(tracker) and group.size() >= 1

    def again(*given: Any) -> Any:
        with autocast(enabled=True, fp8_recipe=recipe):
            return run(*given)

    return torch.utils.checkpoint.checkpoint(again, *inputs, use_reentrant=True)


def quantize(x: torch.Tensor, dim: int, block: int) -> torch.Tensor:
    """``x`` rounded to e4m3 with one power of two as scale for each block along ``dim``."""
    rows = x.double().movedim(dim, -1).unflatten(-1, (-1, block))
    amax = rows.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
    scale = torch.exp2(torch.floor(torch.log2(448 / amax)))
    rounded = (rows * scale).to(torch.float8_e4m3fn).double() / scale
    return rounded.flatten(-2).movedim(-1, dim)


class _Linear(torch.autograd.Function):
    """x @ weight.t() of one expert."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.fp8 = State.is_fp8_enabled()
        if ctx.fp8 and len(x) % ALIGNMENT:
            raise RuntimeError(f"a FP8 GEMM takes multiples of {ALIGNMENT} rows, got {len(x)}")
        ctx.dtypes = x.dtype, weight.dtype
        w = quantize(weight, 1, BLOCK) if ctx.fp8 else weight.double()
        own = quantize(x, 1, BLOCK) if ctx.fp8 else x.double()
        columns = quantize(x, 0, ALIGNMENT) if ctx.fp8 and len(x) else own
        ctx.save_for_backward(columns, w)
        return (own @ w.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        columns, w = ctx.saved_tensors
        own = quantize(dy, 1, BLOCK) if ctx.fp8 else dy.double()
        late = quantize(dy, 0, ALIGNMENT) if ctx.fp8 and len(dy) else dy.double()
        return (own @ w).to(ctx.dtypes[0]), (late.t() @ columns).to(ctx.dtypes[1])


class QuantizedExperts(torch.nn.Module):
    """Megatron's experts with their parameters, computing as above."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.local_experts = experts.local_experts

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        parts = []
        sizes = counts.tolist()
        for expert, x, p in zip(self.local_experts, rows.split(sizes), probs.split(sizes)):
            more = -len(x) % ALIGNMENT if State.is_fp8_enabled() else 0
            padded = torch.nn.functional.pad(x, (0, 0, 0, more))
            h: Any = _Linear.apply(padded, expert.linear_fc1.weight)
            gate, up = h.chunk(2, dim=-1)
            inside = gate * up * torch.nn.functional.pad(p, (0, more)).unsqueeze(1)
            y: Any = _Linear.apply(inside.to(x.dtype), expert.linear_fc2.weight)
            parts.append(y[: len(x)])
        return torch.cat(parts), None


def install(layer: Any) -> None:
    """Let ``layer`` quantize its experts, in a context around its forward pass alone."""
    fp8_utils.FP8GlobalStateManager = State
    fp8_utils.transformer_engine = SimpleNamespace(pytorch=SimpleNamespace(fp8_autocast=autocast))
    moe_layer.te_checkpoint = _te_checkpoint
    # Megatron's own checks of these want Transformer Engine's version.
    layer.config.fp8, layer.config.fp8_recipe = "e4m3", "blockwise"
    layer.experts = QuantizedExperts(layer.experts)
    contexts = contextlib.ExitStack()

    def begin(*unused: Any) -> None:
        contexts.enter_context(autocast(enabled=True, fp8_recipe="blockwise"))

    def end(*unused: Any) -> None:
        contexts.close()

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)
