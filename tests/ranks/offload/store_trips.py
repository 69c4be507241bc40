"""What the store's tests share: a store, a set's way there and back, gradients compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.store import ActivationStore
from tests.support.faulty_device import Faults

ROWS, HIDDEN = 12, 16
KEY = (0, 0)


def make_store(make_engine: Any, *resident: torch.Tensor, **kwargs: Any) -> ActivationStore:
    """Poisons what it frees; every copy takes a moment."""
    faults = Faults(delay=lambda way: 0.001, poison=True)
    engine = make_engine(faults=faults)
    kwargs.setdefault("min_bytes", 1)
    engine.device.torch_device = torch.device(kwargs.pop("device_type", "cpu"))
    return ActivationStore(engine, lambda: resident, **kwargs)


def device_bytes(store: ActivationStore, key: Any = KEY) -> int:
    """Bytes of a set's blocks on the device now."""
    return store._sets[key].measure()


def host_bytes(store: ActivationStore, key: Any = KEY) -> int:
    """Bytes of a set's place in the arena."""
    slot = store._sets[key].ticket.slot
    return slot.end - slot.start if slot is not None else 0


def device_sets(store: ActivationStore) -> int:
    """Sets that occupy device memory."""
    return len(store) - len(store.away())


def host_sets(store: ActivationStore) -> int:
    """Sets with a place in the arena."""
    return sum(record.on_host for record in store._sets.values())


def leave(store: ActivationStore, key: Any = KEY) -> None:
    """OFFLOAD and RELEASE."""
    store.offload(key)
    store.release(key)


def come_back(store: ActivationStore, key: Any = KEY) -> None:
    """PREPARE and RELOAD."""
    store.prepare(key)
    store.reload(key)


def trip(store: ActivationStore, key: Any = KEY) -> None:
    """Out and back."""
    leave(store, key)
    come_back(store, key)


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def compare(
    make_engine: Any, function: Callable[[torch.Tensor], torch.Tensor], *shape: int, **kwargs: Any
) -> ActivationStore:
    """The gradient of ``function`` with its set on the host in between, and without."""
    expected = tensor(*(shape or (ROWS, HIDDEN)))
    function(expected).square().sum().backward()
    store = make_store(make_engine, **kwargs)
    x = tensor(*(shape or (ROWS, HIDDEN)))
    with store.saving(KEY):
        loss = function(x).square().sum()
    release_storage(x)
    trip(store)
    loss.backward()
    store.finish(KEY)
    store.end_step()
    assert torch.equal(x.grad, expected.grad)
    return store
