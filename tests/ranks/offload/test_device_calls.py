"""The calls that PipeOffload and MPipeMoE make of a device, against a golden file.

A change of their order is a change of what a GPU does, which no test without one would see.
UPDATE_GOLDEN=1 writes the file anew; a change of it needs a reason in the commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.exchange import Exchange, Groups
from megatron_ext.moe.plan import LayerPlan
from megatron_ext.moe.region import Region
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from tests.ranks.moe.regions import EXPERTS, RESTORING, Experts, Store, batch
from tests.support.recording import RecordingDevice, two_ranks
from tests.support.streams import beside

from .store_trips import come_back, leave, tensor, trip

GOLDEN = Path(__file__).with_name("device_calls.txt")
SIDE = "side"


# --- PipeOffload ---


class Block(nn.Module):
    """Saves views of one storage, whole tensors, small ones, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x.exp()).chunk(2, -1)
        return (self.down(torch.tanh(a) * b) + x).square().mean()


def store_on(device: RecordingDevice, policy: str = "dual", **options: Any) -> Any:
    """A store, its model, and passes of microbatches."""
    model = Block()
    arena = HostArena(device.torch_device, options.pop("nbytes", 0), 2)
    store = ActivationStore(
        Engine(device, arena, policy), model.parameters, min_bytes=256, **options
    )

    def forward(microbatch: int, rows: int = 12) -> torch.Tensor:
        x = tensor(rows, 16, seed=microbatch)
        with store.saving((0, microbatch)):
            loss = model(x)
        release_storage(x)
        return loss

    return store, forward


def two_steps(device: RecordingDevice, policy: str) -> None:
    store, forward = store_on(device, policy)
    for rows in (12, 10):
        losses = []
        for microbatch in range(2):
            losses.append(forward(microbatch, rows))
            leave(store, (0, microbatch))
        for microbatch in range(2):
            come_back(store, (0, microbatch))
            losses[microbatch].backward()
            losses[microbatch] = losses[microbatch].detach()
            store.finish((0, microbatch))
        store.end_step()
    store.engine.close()


def far_apart(device: RecordingDevice, policy: str) -> None:
    """Other work between the actions, sets that stay, sets with a place of more than they need."""
    store, forward = store_on(device, policy)
    losses = [forward(microbatch) for microbatch in range(3)]
    store.offload((0, 0), 1 << 14)
    losses.append(forward(3))
    store.release((0, 0))
    store.offload((0, 1))
    store.prepare((0, 0))
    store.release((0, 1))
    store.reload((0, 0))
    while losses:
        number = 4 - len(losses)
        losses.pop(0).backward()
        store.finish((0, number))
        if number == 0:
            come_back(store, (0, 1))
    store.end_step()


def no_room(device: RecordingDevice, policy: str) -> None:
    store, forward = store_on(device, policy, nbytes=16384)
    store.engine.arena.seal()
    losses = [forward(microbatch) for microbatch in range(3)]
    for microbatch in range(3):
        leave(store, (0, microbatch))
    for microbatch in range(3):
        come_back(store, (0, microbatch))
        losses.pop(0).backward()
        store.finish((0, microbatch))


def dropped(device: RecordingDevice, policy: str) -> None:
    """Graphs that go at each point of a set's way."""
    store, forward = store_on(device, policy)
    actions = ("offload", "release", "prepare", "reload")
    for point in range(len(actions) + 1):
        loss = forward(0)
        for number, action in enumerate(actions):
            if number == point:
                del loss
            getattr(store, action)((0, 0))
        store.finish((0, 0))
    loss = forward(0)
    leave(store, (0, 0))
    store.prepare((0, 0))
    store.clear()


def by_policy(device: RecordingDevice, policy: str) -> None:
    store, forward = store_on(device, policy, keep=lambda saved: saved.shape[-1] == 32)
    loss = forward(0)
    trip(store, (0, 0))
    loss.backward()
    store.finish((0, 0))


def two_streams(device: RecordingDevice, policy: str) -> None:
    store, _ = store_on(device, policy)
    model, x = Block(), tensor(12, 16)
    with store.saving((0, 0)):
        h = x * 2
        loss = model(h) + beside(device, SIDE, model.up, h).mean()
    trip(store, (0, 0))
    loss.backward()
    store.finish((0, 0))


# --- MPipeMoE ---


def region_on(device: RecordingDevice, module: Any = None, memory: Memory | None = None) -> Region:
    module = module or Experts()
    exchange = Exchange(Groups(None, None, None), EXPERTS)
    linears = [(module.up, module.down)]
    memory = memory or Memory(device, min_bytes=256)
    return Region(exchange, module, list(module.parameters()), memory, linears=linears)


def call(region: Region, x: Any, plan: LayerPlan) -> torch.Tensor:
    _, probs, chosen = batch(len(x))
    return region(x, probs.requires_grad_(), chosen, plan)


def layers(strategy: str, chunks: int, lookahead: int = 2) -> Callable[[RecordingDevice], None]:
    """Two layers that share memory, twice forward and backward."""

    def run(device: RecordingDevice) -> None:
        plan = LayerPlan.of(chunks, strategy, lookahead)
        first = region_on(device)
        second = region_on(device, memory=first.memory)
        for tokens in (40, 36):
            x = batch(tokens)[0].requires_grad_()
            out = call(second, call(first, x, plan), plan)
            out.square().sum().backward()
            del out, x
        first.memory.close()

    return run


def in_flight(strategy: str) -> Callable[[RecordingDevice], None]:
    """Two microbatches between forward and backward, of which a third one drops its graph."""

    def run(device: RecordingDevice) -> None:
        region, plan = region_on(device), LayerPlan.of(3, strategy)
        outs = [call(region, batch()[0].requires_grad_(), plan) for _ in range(3)]
        del outs[1]
        for out in outs[::-1]:
            out.sum().backward()
        with torch.no_grad():
            call(region, batch()[0], plan)
        region.memory.ring.clear()

    return run


def little_host(nbytes: int, now: bool) -> Callable[[RecordingDevice], None]:
    def run(device: RecordingDevice) -> None:
        for strategy in ("s1", "s2", "s3"):
            region = region_on(device)
            region.memory.size_host(nbytes, now)
            call(region, batch()[0].requires_grad_(), LayerPlan.of(4, strategy)).sum().backward()
            region.memory.close()

    return run


def postponed(strategy: str) -> Callable[[RecordingDevice], None]:
    def run(device: RecordingDevice) -> None:
        module, store = Experts(), Store()
        module.up.store = module.down.store = store
        region = region_on(device, module)
        region.store = store
        call(region, batch()[0].requires_grad_(), LayerPlan.of(3, strategy)).sum().backward()

    return run


def scenarios() -> Iterator[tuple[str, Callable[[RecordingDevice], None]]]:
    """All, by name."""
    for policy in ("single", "dual"):
        for one in (two_steps, far_apart, no_room, dropped, by_policy, two_streams):
            yield (
                f"{one.__name__.replace('_', ' ')}, {policy}",
                lambda device, one=one, p=policy: one(device, p),
            )
    for strategy in ("none", *RESTORING):
        yield f"layers {strategy}", layers(strategy, 3)
    yield "layers, other order", layers("s1", 5, 3)
    for strategy in ("s1", "s2", "s4"):
        yield f"in flight {strategy}", in_flight(strategy)
    for nbytes, now in ((6144, True), (6144, False), (1 << 60, False)):
        yield f"host of {nbytes} bytes, now {now}", little_host(nbytes, now)
    for strategy in ("none", "s0"):
        yield f"postponed {strategy}", postponed(strategy)


def summary(scenario: Callable[[RecordingDevice], None], early: bool) -> str:
    """What it calls, with copies as early or as late as may be."""
    device = RecordingDevice(early)
    with device, two_ranks(device):
        scenario(device)
    return device.summary()


def test_no_call_has_changed() -> None:
    now = [
        f"{name}, {'early' if early else 'late'} copies: {summary(scenario, early)}"
        for name, scenario in scenarios()
        for early in (False, True)
        if not early or "," in name or "s1" in name  # the others differ by what waits
    ]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(now) + "\n", encoding="utf-8")
    assert now == GOLDEN.read_text(encoding="utf-8").splitlines()
