"""Every call that memory sets make of a device, in order: what a rebuild must not change unseen.

No GPU is needed: a set's streams, events, copies and frees are issued in the same order there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_ext.moe import exchange
from megatron_ext.offload.blocks import Form
from megatron_ext.offload.device import Direction

from .streams import COMPUTE, COPIES, Memory, StreamDevice, StreamEvent

PRODUCTS = ("aten::mm", "aten::addmm")  # of all kernels; others differ between releases of torch


class RecordedEvent(StreamEvent):
    """An event whose queries by the host are calls, too."""

    device: RecordingDevice
    name: int

    def query(self) -> bool:
        done = super().query()
        if not self.device.inside:
            self.device.note(f"query {self.name}")
        return done


class RecordingDevice(StreamDevice):
    """Notes what it is asked for; to be entered, so that all memory is its own.

    Args:
        early: copies run at once; otherwise when compute has to wait for them.
        full: also notes memory that only kernels use, which differs between releases of torch.
    """

    def __init__(self, early: bool = False, full: bool = False) -> None:
        super().__init__((COMPUTE, *COPIES) if early else (COMPUTE,))
        self.full = full
        self.calls: list[str] = []
        self.inside = False
        self._names: dict[int, int] = {}  # of memory, by address
        self._events = self._memories = 0

    def note(self, call: str) -> None:
        """One call, with the stream that is current."""
        self.calls.append(call if self.current == COMPUTE else f"{self.current}: {call}")

    def summary(self) -> str:
        """Calls of each kind, and a digest of all in order."""
        kinds = Counter(call.split(": ")[-1].split()[0] for call in self.calls)
        digest = hashlib.sha256("\n".join(self.calls).encode()).hexdigest()[:16]
        return " ".join(f"{kind}={count}" for kind, count in sorted(kinds.items())) + " " + digest

    def _place(self, tensor: torch.Tensor) -> str:
        """Memory of the device by its number, the host's by its offset; with the bytes."""
        address = tensor.untyped_storage().data_ptr()
        name = self._names.get(address)
        if name is None and address in self._used:
            name = self._names[address] = self._memories
            self._memories += 1
        at = tensor.storage_offset() * tensor.itemsize
        return f"{'host' if name is None else f'memory {name}'}[{at}+{tensor.nbytes}]"

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """What the emulation asks itself is nobody's call."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def record(self, timed: bool = False) -> Any:
        with self._quiet():
            event: Any = super().record(timed)
        event.__class__, event.device, event.name = RecordedEvent, self, self._events
        self._events += 1
        self.note(f"record {event.name}{' timed' if timed else ''}")
        return event

    def wait(self, event: Any) -> None:
        self.note(f"wait {event.name}")
        with self._quiet():
            super().wait(event)

    def waited(self, reached: Any, copied: Any) -> float | None:
        with self._quiet():
            return super().waited(reached, copied)

    def copy(
        self, stream: int, direction: Direction, pairs: Any, after: Sequence[Any], guard: Any = None
    ) -> Any:
        places = ", ".join(f"{self._place(a)} < {self._place(b)}" for a, b in pairs)
        self.note(f"copy {direction.value} {places}")
        return super().copy(stream, direction, pairs, after, guard)

    def allocate(self, nbytes: int, form: Form | None = None) -> torch.Tensor:
        with self._quiet():
            memory = super().allocate(nbytes, form)
        if self.full or not self.inside:
            self.note(f"allocate {self._place(memory)}")
        return memory

    def _empty(self, like: Any) -> Any:
        with self._quiet():
            return super()._empty(like)

    def record_use(self, buffer: torch.Tensor) -> None:
        self.note(f"record_use {self._place(buffer).split('[')[0]}")
        super().record_use(buffer)

    def discard(self, buffer: torch.Tensor) -> None:
        self.note(f"discard {self._place(buffer).split('[')[0]}")

    def _drop(self, memory: Memory) -> None:
        name = self._names.pop(memory.whole.data_ptr(), None)
        if name is not None:
            self.note(f"free {name}")
        with self._quiet():
            super()._drop(memory)

    def synchronize(self, *names: str) -> None:
        with self._quiet():
            super().synchronize(*names)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in PRODUCTS:
            self.note(func._schema.name)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Work:
    """A collective under way."""

    def __init__(self, device: RecordingDevice, name: str) -> None:
        self._device, self._name = device, name

    def wait(self) -> None:
        self._device.note(f"arrived {self._name}")


class TwoRanks:
    """Collectives of two ranks with the same routing; what comes is any row that was sent.

    Stands for ``torch.distributed`` in ``moe.exchange``.
    """

    def __init__(self, device: RecordingDevice) -> None:
        self._device, self._count = device, 0

    def get_world_size(self, group: Any) -> int:
        return 2

    def get_rank(self, group: Any) -> int:
        return 0

    def _launched(self, kind: str, *tensors: torch.Tensor) -> _Work:
        self._count += 1
        name = f"{kind} {self._count}"
        self._device.note(f"launch {name} {'+'.join(str(t.nbytes) for t in tensors)}")
        return _Work(self._device, name)

    def all_gather_into_tensor(self, out: Any, own: Any, group: Any, async_op: bool) -> _Work:
        out.view(2, -1).copy_(own.expand(2, -1))
        return self._launched("gather", out, own)

    def all_to_all_single(
        self, out: Any, rows: Any, received: Any, sent: Any, group: Any, async_op: bool = False
    ) -> _Work:
        if len(rows):
            out.copy_(rows[torch.arange(len(out)) % len(rows)])
        return self._launched("exchange", out, rows)


@contextmanager
def two_ranks(device: RecordingDevice) -> Iterator[None]:
    """Inside, ``Exchange`` is one of two ranks."""
    with mock.patch.object(exchange, "dist", TwoRanks(device)):
        yield
