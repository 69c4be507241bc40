"""A toy model of pipeline stages and its StageRunner, with a count of what memory really lives.

What a linear layer keeps for its weight gradient lies in a ``Buffer``, a Python object that the
tensor's storage owns. A weak reference to it tells when that memory is really freed, whatever
autograd, the store or the executor believe.
"""

from __future__ import annotations

import functools
import random
import time
import weakref
from collections import defaultdict
from typing import Any

import torch

from megatron_ext.runtime.executor import StageRunner
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule.placement import Placement

HIDDEN, ROWS = 8, 6
SHAPE = (ROWS, HIDDEN)


class Buffer(bytearray):
    """Memory of one tensor; unlike a plain bytearray it can be referenced weakly."""


def in_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[Buffer]]:
    """A copy of ``tensor``, and a reference that dies with the copy's memory."""
    buffer = Buffer(tensor.numel() * tensor.element_size())
    copy = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy, weakref.ref(buffer)


class Ledger:
    """Which activation sets own memory."""

    def __init__(self) -> None:
        self.sets: dict[tuple[int, int], list[weakref.ref[Buffer]]] = defaultdict(list)
        self.open: tuple[int, int] | None = None
        self.peak = 0
        self.mistakes: list[str] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that counts as part of the open set (outside of one: the tensor itself)."""
        if self.open is None:
            return tensor
        copy, reference = in_buffer(tensor)
        self.sets[self.open].append(reference)
        return copy

    def alive(self, key: tuple[int, int]) -> int:
        """How many tensors of one set own memory now."""
        return sum(reference() is not None for reference in self.sets[key])

    def count(self) -> None:
        """Note how many sets own memory now."""
        self.peak = max(self.peak, sum(self.alive(key) > 0 for key in self.sets))

    def expect(self, key: tuple[int, int], tensors: int, when: str) -> None:
        """After ``when``, the set must own that many tensors."""
        if self.alive(key) != tensors:
            self.mistakes.append(f"{key} owns {self.alive(key)} tensors {when}, not {tensors}")


class SplitLinear(torch.autograd.Function):
    """``x @ weight.T``; its backward leaves the weight gradient to the store inside a B pass."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, store: WeightGradStore, ledger: Ledger) -> Any:
        """Keep a copy of ``x`` that the ledger can see."""
        ctx.save_for_backward(ledger.keep(x), weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """B, and W too unless it is postponed."""
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.store.collecting:
            return grad_x, _weight_gradient(x, grad), None, None
        ctx.store.put(weight, functools.partial(_accumulate, weight, x, grad))
        return grad_x, None, None, None


def _weight_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    # A Buffer is not aligned as torch aligns, and alignment may change a product's last bits.
    return grad.t() @ x.clone()


def _accumulate(weight: torch.nn.Parameter, x: torch.Tensor, grad: torch.Tensor) -> None:
    product = _weight_gradient(x, grad)
    if weight.grad is None:
        weight.grad = product
    else:
        weight.grad += product


class Stage(torch.nn.Module):
    """A residual block: a norm, whose gain is never split, and two linear layers, which are."""

    def __init__(
        self, stage: int, dtype: torch.dtype, store: WeightGradStore, ledger: Ledger
    ) -> None:
        super().__init__()
        random_state = torch.Generator().manual_seed(1000 + stage)
        self.store, self.ledger = store, ledger
        for name, shape in (("gain", (HIDDEN,)), ("up", (24, HIDDEN)), ("down", (HIDDEN, 24))):
            value = torch.randn(shape, generator=random_state, dtype=dtype) / 2
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(ROWS, HIDDEN) -> the same."""
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        h = torch.tanh(SplitLinear.apply(h, self.up, self.store, self.ledger))
        return x + SplitLinear.apply(h, self.down, self.store, self.ledger)


LINEAR_LAYERS = 2


def data(microbatch: int, dtype: torch.dtype) -> torch.Tensor:
    """Input of the first stage."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(microbatch), dtype=dtype)


def loss_of(y: torch.Tensor, microbatch: int) -> torch.Tensor:
    """Loss of the last stage's output."""
    return (y - data(10_000 + microbatch, y.dtype)).square().mean()


def step(stages: dict[int, Stage]) -> dict[str, bytes]:
    """Gradients as bytes, then plain SGD, so that a wrong iteration spoils those after it."""
    grads = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            grads[f"{number}.{name}"] = to_bytes(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    return grads


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's exact content."""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


class ToyRunner(StageRunner):
    """StageRunner of one rank for one iteration."""

    def __init__(
        self,
        stages: dict[int, Stage],
        placement: Placement,
        rank: int,
        store: WeightGradStore,
        ledger: Ledger,
        forward_only: bool = False,
        jitter: random.Random | None = None,
    ) -> None:
        self.stages, self.placement, self.rank = stages, placement, rank
        self.store, self.ledger, self.forward_only = store, ledger, forward_only
        self.jitter = jitter
        self.dtype = next(iter(stages.values())).gain.dtype
        self.live: dict[tuple[int, int], tuple[Any, Any] | None] = {}
        self.losses: dict[int, bytes] = {}

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """F."""
        self._dawdle()
        number = self.placement.stages[self.rank][chunk]
        if number == 0:
            assert x is None
            x = data(microbatch, self.dtype)
        else:
            x.requires_grad_(not self.forward_only)
        last = number == self.placement.num_stages - 1
        self.ledger.open = None if self.forward_only else (chunk, microbatch)
        with torch.set_grad_enabled(not self.forward_only):
            y = self.stages[number](x)
            if last:
                y = loss_of(y, microbatch)
                self.losses[microbatch] = to_bytes(y)
        self.ledger.open = None
        if not self.forward_only:
            self.live[chunk, microbatch] = x, y
            self.ledger.expect((chunk, microbatch), LINEAR_LAYERS, "after F")
            self.ledger.count()
        return None if last else y.detach()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        """B or BW."""
        self._dawdle()
        key = (chunk, microbatch)
        x, y = self.live[key]
        if split:
            with self.store.collect(key):
                torch.autograd.backward(y, grad)
            self.live[key] = None
            self.ledger.expect(key, LINEAR_LAYERS, "after B")
        else:
            torch.autograd.backward(y, grad)
            del self.live[key]
            self.ledger.expect(key, 0, "after BW")
        return x.grad

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        self._dawdle()
        self.store.run((chunk, microbatch))
        del self.live[chunk, microbatch]
        self.ledger.expect((chunk, microbatch), 0, "after W")

    def live_sets(self) -> int:
        """Activation sets held, as this runner believes."""
        return len(self.live)

    def _dawdle(self) -> None:
        if self.jitter is not None:
            time.sleep(self.jitter.uniform(0, 0.003))
