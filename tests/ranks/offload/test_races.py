"""Random delays on every copy, poisoned memory, random orders: gradients stay exact, step by step.

Every step runs the same passes twice: plainly, and with sets leaving and coming back at random
points of a random order. Weights change after each step, so one wrong bit spoils the rest.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ext.integration.saved_parameters import parameter_of
from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.store import ActivationStore
from megatron_ext.runtime.wgrad import WeightGradStore
from tests.support.faulty_device import Faults
from tests.support.streams import StreamDevice

HIDDEN, MICROBATCHES = 8, 3
STEPS = 300


class Split(torch.autograd.Function):
    """A linear layer whose weight gradient waits for W; Megatron's way of saving."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wgrad: Any, find: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.wgrad, ctx.find = wgrad, find
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight = ctx.find(weight)

        def task() -> None:
            product = grad.t() @ x
            weight.grad = product if weight.grad is None else weight.grad + product

        ctx.wgrad.put(weight, task)
        return grad @ weight.detach(), None, None, None


class Chunk(nn.Module):
    """A residual block with a view, a norm and two split linear layers."""

    def __init__(self, wgrad: WeightGradStore, find: Any, seed: int) -> None:
        super().__init__()
        self.wgrad, self.find = wgrad, find
        generator = torch.Generator().manual_seed(seed)
        self.gain = nn.Parameter(torch.randn(HIDDEN, generator=generator))
        self.up = nn.Parameter(torch.randn(2 * HIDDEN, HIDDEN, generator=generator) / 2)
        self.down = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        a, b = Split.apply(h, self.up, self.wgrad, self.find).chunk(2, -1)
        return x + Split.apply(torch.tanh(a) * b, self.down, self.wgrad, self.find)


def _plan(rng: random.Random) -> list[tuple[str, int]]:
    """A random order of F, OFFLOAD, ..., W over the microbatches; each one's own order is right,
    F, B and W run in microbatch order, and some sets never leave."""
    rows = []
    for microbatch in range(MICROBATCHES):
        row = ["F", "B", "W"]
        if rng.random() < 0.8:
            row[1:1] = ["offload", "release", "prepare", "reload"]
        rows.append([(action, microbatch) for action in row])
    done: dict[str, int] = {"F": 0, "B": 0, "W": 0}
    plan = []
    while any(rows):
        row = rng.choice([row for row in rows if row])
        action, microbatch = row[0]
        if done.get(action, microbatch) == microbatch:
            if action in done:
                done[action] = microbatch + 1
            plan.append(row.pop(0))
    return plan


def _step(
    chunk: Chunk, plan: list[tuple[str, int]], rows: list[int], step: int, store: Any
) -> dict[str, torch.Tensor]:
    graphs: dict[int, Any] = {}
    inputs = {}
    leaves = {microbatch for action, microbatch in plan if action == "offload"}
    for action, microbatch in plan:
        key = (0, microbatch)
        if action == "F":
            generator = torch.Generator().manual_seed(step * MICROBATCHES + microbatch)
            x = torch.randn(rows[microbatch], HIDDEN, generator=generator).requires_grad_(True)
            if store is None:
                graphs[microbatch] = chunk(x).square().mean()
            else:
                with store.saving(key):
                    graphs[microbatch] = chunk(x).square().mean()
                if microbatch in leaves:
                    release_storage(x)
            inputs[microbatch] = x
        elif action == "B":
            with chunk.wgrad.collect(microbatch):
                graphs.pop(microbatch).backward()
        elif action == "W":
            chunk.wgrad.run(microbatch)
            if store is not None:
                store.finish(key)
        elif store is not None:
            getattr(store, action)(key)
    grads = {f"x{m}": x.grad for m, x in inputs.items()}
    for name, parameter in chunk.named_parameters():
        grads[name] = parameter.grad
        parameter.grad = None
    return grads


def test_random_steps_are_exact(make_engine):
    rng = random.Random(0)
    delays = random.Random(1)
    # Mostly short, sometimes longer than everything that happens meanwhile.
    faults = Faults(lambda way: delays.choice([0, 0, 1e-4, 1e-3, 4e-3]), poison=True)
    engine = make_engine(expected_sets=MICROBATCHES, faults=faults)
    wgrad = WeightGradStore()
    plain = Chunk(wgrad, lambda weight: weight, seed=0)
    moved = Chunk(wgrad, parameter_of, seed=0)
    store = ActivationStore(engine, moved.parameters, min_bytes=64)
    capacity = 0
    for step in range(STEPS):
        plan = _plan(rng)
        # The first step has the largest sets, so that no later one is refused.
        rows = [rng.randint(1, 16) if step else 16 for _ in range(MICROBATCHES)]
        if not step:
            order = {"F": 0, "offload": 1}
            plan.sort(key=lambda item: order.get(item[0], 2))
        expected = _step(plain, plan, rows, step, None)
        got = _step(moved, plan, rows, step, store)
        for name, grad in expected.items():
            assert grad.isfinite().all()
            assert torch.equal(got[name], grad), f"step {step}: {name} differs; plan {plan}"
        store.end_step()
        capacity = capacity or engine.arena.capacity_bytes
        assert engine.arena.capacity_bytes == capacity and engine.arena._sealed
        assert engine.arena.used_bytes == 0
        with torch.no_grad():
            for chunk, grads in ((plain, expected), (moved, got)):
                for name, parameter in chunk.named_parameters():
                    parameter -= 1e-3 * grads[name].sign()
        if step % 20 == 0:  # Evaluation in between.
            with torch.no_grad(), store.saving((0, 0)):
                moved(torch.randn(3, HIDDEN))
    counters = engine.counters
    assert counters.offloads > STEPS and counters.bytes_to_host > 0
    assert counters.waited_releases > 0 and counters.reloads == counters.offloads
    assert counters.waited_uses > 0


@pytest.mark.parametrize("edge", ["release-after-offload", "use-after-reload"])
def test_autograd_sees_what_a_missing_edge_spoils(make_engine, edge):
    """The same mutation as in test_engine, through the store and a real backward pass."""
    for skipped in ((), (edge,)):
        engine = make_engine(skip_edges=skipped, device_class=StreamDevice)
        store = ActivationStore(engine, min_bytes=1)
        x = torch.randn(64, HIDDEN).requires_grad_(True)
        with engine.device:
            with store.saving((0, 0)):
                y = x.exp().sum()
            for action in ("offload", "release", "prepare", "reload"):
                getattr(store, action)((0, 0))
            y.backward()
        engine.synchronize()
        store.finish((0, 0))
        assert torch.equal(x.grad, x.detach().exp()) is not bool(skipped)
