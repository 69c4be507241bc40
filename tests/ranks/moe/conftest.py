"""One rank, without Megatron: a process group of its own, and experts of a few lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def group() -> Iterator[object]:
    """A gloo group of this process alone."""
    if dist.is_initialized():
        pytest.skip("another test's process group is in the way")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
