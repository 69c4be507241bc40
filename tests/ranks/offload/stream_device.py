"""A CPU device whose compute is a stream of its own, and whose allocator reuses memory at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.offload.device import Event, HostEvent, Worker
from tests.support.faulty_device import FaultyDevice


class StreamDevice(FaultyDevice):
    """As a GPU with its caching allocator.

    ``allocate`` hands out discarded buffers of the same size, last one first; a discarded buffer
    is filled with 0xFF on the compute stream.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._computer = Worker("compute stream")
        self._pool: dict[int, list[torch.Tensor]] = defaultdict(list)

    def compute(self, task: Callable[[], None]) -> None:
        """Give ``task`` to compute."""
        self._computer.put(task)

    def record(self) -> HostEvent:
        return self._computer.put(lambda: None)

    def wait(self, event: Event) -> None:
        self.compute(event.synchronize)

    def allocate(self, nbytes: int) -> torch.Tensor:
        pool = self._pool[nbytes]
        return pool.pop() if pool else super().allocate(nbytes)

    def discard(self, buffer: torch.Tensor) -> None:
        def poison() -> None:
            buffer.fill_(0xFF)

        self.compute(poison)
        self._pool[buffer.numel()].append(buffer)

    def synchronize(self) -> None:
        self._copies.append(self.record())
        super().synchronize()

    def close(self) -> None:
        super().close()
        self._computer.close()
