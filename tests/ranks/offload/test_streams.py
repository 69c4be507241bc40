"""Sets that several compute streams use, on a device that runs behind the host and reuses memory.

Megatron's ``--moe-shared-expert-overlap`` computes shared experts on a stream of their own, forward
and backward. Reloaded memory belongs to the main stream.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ext.offload.store import ActivationStore
from tests.support.streams import COMPUTE, COPIES, StreamDevice, beside

from .store_trips import HIDDEN, KEY, ROWS, come_back, leave, tensor

SIDE = "shared experts"
# Each stream as early or as late as its waits allow.
EAGER = [
    names
    for count in range(4)
    for names in itertools.combinations((COMPUTE, SIDE, COPIES[0]), count)
]


class Experts(nn.Module):
    """A main branch, and shared experts beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))
        self.shared = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))

    def forward(self, x: torch.Tensor, device: StreamDevice | None = None) -> torch.Tensor:
        h = x * 2
        shared = self.shared(h) if device is None else beside(device, SIDE, self.shared, h)
        return (self.main(h) + shared).square().mean()


def grads_of(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Gradients of the input and of all parameters, which are dropped."""
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("eager", EAGER, ids=lambda names: ", ".join(names) or "none")
def test_another_stream_may_use_reloaded_memory_late(make_engine, eager):
    model, x = Experts(), tensor(ROWS, HIDDEN)
    model(x).backward()
    expected = grads_of(model, x)
    engine = make_engine(expected_sets=2, device_class=StreamDevice, eager=eager)
    store = ActivationStore(engine, model.parameters, min_bytes=1)
    inputs = [tensor(ROWS, HIDDEN) for _ in range(2)]
    with engine.device:
        losses = []
        for microbatch, each in enumerate(inputs):
            with store.saving((0, microbatch)):
                losses.append(model(each, engine.device))
            leave(store, (0, microbatch))
        for microbatch, loss in enumerate(losses):
            come_back(store, (0, microbatch))
            loss.backward()
            store.finish((0, microbatch))
    store.end_step()
    engine.synchronize()
    assert engine.counters.bytes_to_device > 2 * ROWS * HIDDEN * 4
    twice = [x.grad for x in inputs]
    assert all(torch.equal(grad, expected[0]) for grad in twice)
    for grad, once in zip(grads_of(model, x)[1:], expected[1:]):
        assert torch.equal(grad, 2 * once)


@pytest.mark.parametrize("eager", EAGER, ids=lambda names: ", ".join(names) or "none")
def test_unused_memory_waits_for_its_reload(make_engine, eager):
    """A part of the set is used on another stream only; nobody uses the rest."""
    engine = make_engine(device_class=StreamDevice, eager=eager)
    store = ActivationStore(engine, min_bytes=1)
    x = tensor(ROWS, HIDDEN)
    with engine.device as device:
        with store.saving(KEY):
            used, unused = beside(device, SIDE, torch.exp, x), x.exp()
        leave(store)
        come_back(store)
        used.sum().backward()
        del unused
        others = [tensor(ROWS, HIDDEN, seed=seed, grad=False) * 2 for seed in range(3)]
        store.finish(KEY)
    engine.synchronize()
    for seed, other in enumerate(others):
        assert torch.equal(other, tensor(ROWS, HIDDEN, seed=seed, grad=False) * 2)
    assert torch.equal(x.grad, x.detach().exp())
