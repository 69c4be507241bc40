"""Regions on one rank, with experts of a few lines, and what a run of them gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.moe.plan import LayerPlan
from megatron_ext.moe.region import Region

EXPERTS, WIDTH, FFN, TOKENS = 4, 16, 24, 40
RESTORING = ("s0", "s1", "s2", "s3", "s4")


class Postponed(torch.autograd.Function):
    """A product of one expert that leaves its weight gradient to a store."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, store: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.store.put(weight, x, dy)
        return dy @ weight.t(), None, None


class Store:
    """As much of a ``GradientStore`` as the region needs, for weights that are rows of parameters.

    Attributes:
        parts: (input, output gradient) of each chunk, the last one first, by weight.
    """

    def __init__(self) -> None:
        self.parts: dict[Any, list[tuple[Any, Any]]] = {}
        self.calls = 0

    def suspended(self) -> Any:
        raise AssertionError("only where rows are not kept")

    def call(self) -> Any:
        self.parts = {}
        return contextlib.nullcontext()

    def put(self, weight: Any, x: Any, dy: Any) -> None:
        key = weight.untyped_storage()._cdata, weight.storage_offset()
        self.parts.setdefault(key, []).append((x.detach(), dy))

    def takes(self, parameter: Any, grad: Any) -> bool:
        return parameter.untyped_storage()._cdata in {storage for storage, _ in self.parts}

    def gradients(self, parameters: Any) -> Any:
        self.calls += 1
        found = []
        for parameter in parameters:
            gradient = torch.zeros_like(parameter)
            for one, part in zip(parameter.detach(), gradient):
                parts = self.parts.pop((one.untyped_storage()._cdata, one.storage_offset()), [])
                if parts:
                    x, dy = (torch.cat(each[::-1]) for each in zip(*parts))
                    part.copy_(x.t() @ dy)
            found.append(gradient)
        return found


class Product(torch.nn.Module):
    """A matrix an expert."""

    store: Store | None = None

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, inputs, outputs, generator=generator))

    def forward(self, x: Any, sizes: list[int]) -> Any:
        parts = x.split(sizes)
        if self.store is not None:
            pairs = zip(parts, self.weight)
            return torch.cat([Postponed.apply(a, w, self.store) for a, w in pairs]), None
        return torch.cat([a @ w for a, w in zip(parts, self.weight)]), None


class Experts(torch.nn.Module):
    """Two matrices an expert, with the probability applied between them, as Megatron does it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up = Product(WIDTH, FFN, generator)
        self.down = Product(FFN, WIDTH, generator)

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        assert sum(sizes) == len(x) == len(probs)
        inner, _ = self.up(x, sizes)
        return self.down(torch.tanh(inner) * probs.unsqueeze(1), sizes)[0]


class OneByOne(torch.nn.Module):
    """The same, with each expert a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        grouped = Experts()
        self.experts = torch.nn.ModuleList()
        for up, down in zip(grouped.up.weight.data, grouped.down.weight.data):
            pair = torch.nn.Module()
            pair.up, pair.down = (torch.nn.Linear(*w.shape, bias=False) for w in (up, down))
            pair.up.weight.data, pair.down.weight.data = up.t().clone(), down.t().clone()
            self.experts.append(pair)

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        parts = zip(self.experts, x.split(sizes), probs.split(sizes))
        return torch.cat([e.down(torch.tanh(e.up(a)) * p.unsqueeze(1)) for e, a, p in parts])


def batch(tokens: int = TOKENS, seed: int = 0) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(2, dim=1).indices, True)
    return hidden, scores * chosen, chosen


def dense(region: Region, hidden: Any, probs: Any) -> Any:
    """The same layer as a plain sum over all experts."""
    up, down = region.parameters
    inner = torch.tanh(torch.einsum("tw,ewf->etf", hidden, up)) * probs.t().unsqueeze(2)
    return torch.einsum("etf,efw->tw", inner, down)


def run(
    region: Region,
    chunks: int,
    strategy: str,
    layers: int = 1,
    between: Callable[[], object] = lambda: None,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """``layers`` calls behind each other, so that they share buffers, and their backward pass;
    ``between`` is called after the forward pass."""
    hidden, probs, chosen = batch(tokens)
    x, p = hidden.requires_grad_(), probs.requires_grad_()
    out = x
    for _ in range(layers):
        out = out + region(out, p, chosen, LayerPlan.of(chunks, strategy))
    between()
    gradients = torch.autograd.grad(out.square().sum(), [x, p, *region.parameters])
    names = ("out", "x", "p", "up", "down", *range(len(gradients)))
    return dict(zip(names, (out.detach(), *gradients)))


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)
