"""Engines and stores on CPU tensors, where copy streams are threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """``make_engine(arena_bytes=0, expected_sets=1, skip_edges=(), device_class=FaultyDevice,
    **device)``: an engine that is closed after the test."""
    from megatron_ext.offload.arena import HostArena
    from megatron_ext.offload.engine import Engine
    from tests.support.faulty_device import FaultyDevice
    from tests.support.leaky_engine import leave_out

    engines = []

    def make(
        arena_bytes: int = 0,
        expected_sets: int = 1,
        skip_edges: Any = (),
        device_class: Any = FaultyDevice,
        **device: Any,
    ) -> Any:
        on = device_class(**device)
        arena = HostArena(on.torch_device, arena_bytes, expected_sets)
        engines.append(Engine(on, arena))
        if skip_edges:
            leave_out(engines[-1], skip_edges)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
