"""Activation offloading on a GPU: exact, without host synchronisation, overlapped; measured rates.

pytest tests/gpu -m gpu
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
HIDDEN, ROWS = 2048, 4096


@pytest.fixture
def engines() -> Iterator[Any]:
    """``engines(arena_bytes)``; closed after the test."""
    import torch

    from megatron_ext.offload.arena import HostArena
    from megatron_ext.offload.device import CudaDevice
    from megatron_ext.offload.engine import Engine

    made = []

    def make(arena_bytes: int = 0, expected_sets: int = 1) -> Any:
        device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
        arena = HostArena(device.torch_device, arena_bytes, expected_sets)
        made.append(Engine(device, arena))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(4):
        layers += [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU()]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def _input(microbatch: int) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(microbatch)
    x = torch.randn(ROWS, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(True)


def _step(model: Any, microbatches: int, store: Any = None) -> list[Any]:
    """Gradients of a step in which all sets leave after F and come back two passes before B."""
    from megatron_ext.offload.blocks import release_storage

    losses, inputs = {}, {}
    for m in range(microbatches):
        x = inputs[m] = _input(m)
        if store is None:
            losses[m] = model(x).float().square().mean()
            continue
        with store.saving((0, m)):
            losses[m] = model(x).float().square().mean()
        release_storage(x)
        store.offload((0, m))
        if m:
            store.release((0, m - 1))
    if store is not None:
        store.release((0, microbatches - 1))
    ahead = 0
    for m in range(microbatches):
        while store is not None and ahead < min(microbatches, m + 2):
            store.prepare((0, ahead))
            store.reload((0, ahead))
            ahead += 1
        losses.pop(m).backward()
        if store is not None:
            store.finish((0, m))
    if store is not None:
        store.end_step()
    grads = [x.grad for x in inputs.values()] + [p.grad for p in model.parameters()]
    model.zero_grad()
    return grads


def test_exact_without_host_synchronisation(engines: Any) -> None:
    import torch

    from megatron_ext.offload.store import ActivationStore

    model = _model()
    expected = _step(model, 4)
    engine = engines(expected_sets=4)
    store = ActivationStore(engine, model.parameters)
    _step(model, 4, store)
    capacity, retries = engine.arena.capacity_bytes, torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(20):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = _step(model, 4, store)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, got, expected))
    assert engine.arena.capacity_bytes == capacity
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
    assert engine.counters.refused == 0 and store.statistics.held_elsewhere_bytes == 0


def test_late_copies_change_nothing(engines: Any) -> None:
    """Every copy stream is made to lag behind compute."""
    import torch

    from megatron_ext.offload.store import ActivationStore

    model = _model()
    expected = _step(model, 3)
    engine = engines(expected_sets=3)
    device = engine.device
    original = device.copy

    def slow(stream: int, *args: Any) -> Any:
        with torch.cuda.stream(device._streams[stream % 2]):
            torch.cuda._sleep(20_000_000)  # about 10 ms
        return original(stream, *args)

    device.copy = slow
    store = ActivationStore(engine, model.parameters)
    for _ in range(5):
        assert all(map(torch.equal, _step(model, 3, store), expected))


def test_another_stream_reads_reloaded_memory_late(engines: Any) -> None:
    """As shared experts beside the dispatch: autograd drops what the slow stream still reads."""
    import torch

    from megatron_ext.offload.store import ActivationStore

    engine, side = engines(), torch.cuda.Stream()
    store = ActivationStore(engine)

    def loss(x: Any) -> Any:
        main = x.float().sin().sum()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.float().exp().sum()
        torch.cuda.current_stream().wait_stream(side)
        return main + y

    x, other = _input(0), _input(0)
    loss(other).backward()
    for _ in range(3):
        x.grad = None
        with store.saving((0, 0)):
            total = loss(x)
        for action in (store.offload, store.release, store.prepare, store.reload):
            action((0, 0))
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # about 50 ms
        # The side branch's nodes, the last ones made, are issued first; then the main branch's
        # take memory, while the other stream sleeps.
        total.backward()
        store.finish((0, 0))
        torch.cuda.synchronize()
        assert torch.equal(x.grad, other.grad)
        store.end_step()


def test_memory_leaves_and_the_arena_is_pinned(engines: Any) -> None:
    import torch

    from megatron_ext.offload.store import ActivationStore

    model = _model()
    engine = engines()
    store = ActivationStore(engine, model.parameters)
    x = _input(0)
    with store.saving((0, 0)):
        loss = model(x).float().square().mean()
    store.offload((0, 0))
    before, here = torch.cuda.memory_allocated(), store.footprint((0, 0)).device
    from megatron_ext.offload.blocks import release_storage

    release_storage(x)
    store.release((0, 0))
    freed = before - torch.cuda.memory_allocated()
    assert here > 100 * MIB and abs(freed - here) < MIB
    assert engine.arena.allocate(1024).memory.is_pinned()
    store.prepare((0, 0))
    store.reload((0, 0))
    loss.backward()
    store.finish((0, 0))


def test_rates_and_overlap(engines: Any, record_property: Any) -> None:
    """Real rates; copies that run beside compute cost little of its time."""
    import torch

    from megatron_ext.offload.device import Direction
    from megatron_ext.offload.rates import measure_rates

    engine = engines(512 * MIB)
    host = engine.arena.allocate(512 * MIB).memory
    rates = measure_rates(engine.device, host)
    record_property("rates", str(rates))
    assert rates.to_host > 1e9 and rates.to_device > 1e9

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    block = engine.device.allocate(256 * MIB)

    def seconds(compute: bool, copy: bool) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        ready = engine.device.record()
        if copy:
            for _ in range(4):
                pair = (host[: 256 * MIB], block)
                engine.device.copy(0, Direction.TO_HOST, [pair], [ready])
        if compute:
            for _ in range(40):
                a @ a
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(True, True)
    alone, copies, both = seconds(True, False), seconds(False, True), seconds(True, True)
    print(f"compute {alone:.4f} s, copies {copies:.4f} s, together {both:.4f} s")
    assert both < 0.8 * (alone + copies)
