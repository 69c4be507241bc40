"""Device buffers that the chunks of all MoE layers of a rank take turns in.

A buffer is there per purpose and slot; chunk i uses slot i mod depth. Buffers only grow, to what
the worst chunk of any rank needs, so after the first steps nothing is allocated any more. Compute
and the collectives are ordered by issue; copies to the host are not, and a slot knows the events
that its next writer has to wait for (MPipeMoE, section III-D).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ..offload.device import Device, Event
from ..offload.engine import Engine, Ticket

DEPTH = 2


@dataclass
class _Slot:
    memory: torch.Tensor | None = None
    readers: list[Event] = field(default_factory=list)


class Ring:
    """The buffers of one rank.

    Args:
        device: orders copies and compute.
        skip: purposes whose readers are not waited for; for mutation tests only.
    """

    def __init__(self, device: Device, skip: Collection[str] = ()) -> None:
        self.device = device
        self._skip = frozenset(skip)
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._wanted: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that there are."""
        return sum(s.memory.numel() for s in self._slots.values() if s.memory is not None)

    def storages(self) -> set[int]:
        """Identities of the storages of all buffers."""
        slots = self._slots.values()
        return {s.memory.untyped_storage()._cdata for s in slots if s.memory is not None}

    def reserve(self, purpose: str, nbytes: int) -> None:
        """From now on buffers of ``purpose`` have at least so many bytes."""
        self._wanted[purpose] = max(nbytes, self._wanted.get(purpose, 0))

    def take(self, purpose: str, number: int, nbytes: int) -> torch.Tensor:
        """The memory of a slot, 1-D uint8, at least ``nbytes``; compute may write to it.

        Each call gives a tensor of its own over the slot, with its own version counter: autograd
        must not take the next chunk's writing for a change of this one's saved tensors.
        """
        slot = self._slots.setdefault((purpose, number), _Slot())
        if purpose not in self._skip:
            for event in slot.readers:
                if not event.query():
                    self.device.wait(event)
        slot.readers.clear()
        nbytes = max(nbytes, self._wanted.get(purpose, 0))
        if slot.memory is None or slot.memory.numel() < nbytes:
            slot.memory = None  # first, so that both are never there at the same time
            slot.memory = self.device.allocate(nbytes)
        fresh = torch.empty(0, dtype=torch.uint8, device=slot.memory.device)
        return fresh.set_(slot.memory.untyped_storage(), 0, (slot.memory.numel(),), (1,))

    def read_until(self, purpose: str, number: int, event: Event) -> None:
        """A slot is read by a copy until ``event``."""
        self._slots[purpose, number].readers.append(event)

    def clear(self) -> None:
        """Give all memory back."""
        self._slots.clear()
        self._wanted.clear()


@dataclass
class Leaving:
    """Device memory on its way to the host, held until it has arrived there."""

    ticket: Ticket
    memory: list[torch.Tensor]


class Departures:
    """What is on its way to the host from memory that no ring owns: at most ``depth`` chunks'.

    Without a bound a slow link would keep all chunks' memory; with it, compute waits for the link
    as it would for a slot.
    """

    def __init__(self, engine: Engine, depth: int = DEPTH) -> None:
        self._engine, self._depth = engine, depth
        self._leaving: list[Leaving] = []

    def add(self, ticket: Ticket, memory: list[torch.Tensor]) -> None:
        """Hold ``memory`` until the copy of ``ticket`` is done."""
        self._leaving.append(Leaving(ticket, memory))

    def make_room(self) -> None:
        """Before another chunk computes: let go what has left; wait where too much has not."""
        while self._leaving:
            ticket = self._leaving[0].ticket
            full = len(self._leaving) >= self._depth
            if not self._engine.release(ticket, patient=not full):
                return
            self._drop(self._leaving.pop(0))

    def flush(self) -> None:
        """Let go everything; compute waits for what has not left."""
        while self._leaving:
            self._engine.release(self._leaving[0].ticket)
            self._drop(self._leaving.pop(0))

    def _drop(self, leaving: Leaving) -> None:
        while leaving.memory:
            self._engine.device.discard(leaving.memory.pop())
