"""A CPU device whose copies are late and whose freed memory is poisoned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.offload.blocks import bytes_of
from megatron_ext.offload.device import CpuDevice, Direction, Event, HostEvent, Pairs


@dataclass
class Faults:
    """Faults to inject.

    Attributes:
        delay: seconds that a copy of this direction waits before it starts.
        poison: discarded memory is filled with bytes 0xFF, which is NaN in every float format.
    """

    delay: Callable[[Direction], float] | None = None
    poison: bool = False


class _Delay:
    """An event that copies wait for."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        time.sleep(self._seconds())


class FaultyDevice(CpuDevice):
    """``faults`` may be replaced at any time."""

    def __init__(self, faults: Faults | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.faults = faults or Faults()
        self._under_way: list[Pairs] = []

    def copy(
        self,
        stream: int,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Event],
    ) -> HostEvent:
        def seconds() -> float:
            return 0.0 if self.faults.delay is None else self.faults.delay(direction)

        self._under_way = [former for former in self._under_way if former] + [pairs]
        return super().copy(stream, direction, pairs, [*after, _Delay(seconds)])

    def discard(self, buffer: torch.Tensor) -> None:
        # Where somebody else still uses the memory, dropping it here frees nothing.
        if self.faults.poison and self._owners(buffer) <= 1:
            bytes_of(buffer.untyped_storage()).fill_(0xFF)

    def _owners(self, buffer: torch.Tensor) -> int:
        """How many tensors own the memory of ``buffer``. Copies in flight do not count: on a GPU
        they would not keep it either, and it is their ordering that poison is there to test."""
        # This order of the two counts errs on the side of no poison if a copy ends between them.
        identity = buffer.untyped_storage()._cdata
        owners = int(torch._C._storage_Use_Count(identity)) - 1  # the Python storage object
        tensors = [t for pairs in self._under_way for pair in list(pairs) for t in pair]
        return owners - sum(1 for t in tensors if t.untyped_storage()._cdata == identity)
