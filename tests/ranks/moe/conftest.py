"""One rank, without Megatron: a process group of its own, and experts of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.exchange import Exchange, Groups
from megatron_ext.moe.region import Region
from megatron_ext.offload.device import CpuDevice
from tests.ranks.moe.regions import EXPERTS, Experts
from tests.support.faulty_device import Faults


@pytest.fixture(scope="package")
def group() -> Iterator[object]:
    """A gloo group of this process alone."""
    if dist.is_initialized():
        pytest.skip("another test's process group is in the way")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def make(group: Any) -> Iterator[Callable[..., Region]]:
    """``make(memory)``: a region with weights that are always the same."""
    made: list[Memory] = []

    def make(memory: Memory | None = None, module: Any = None, known: bool = True) -> Region:
        if memory is None:
            memory = Memory(CpuDevice(), min_bytes=1)
        made.append(memory)
        module = module or Experts()
        linears = [(e.up, e.down) for e in getattr(module, "experts", [module])] if known else []
        exchange = Exchange(Groups(group, None, group), EXPERTS)
        return Region(exchange, module, list(module.parameters()), memory, linears=linears)

    yield make
    for memory in made:
        memory.device.faults = Faults()
        memory.close()
