"""The transfer engine orders copies between streams; in steady state the host never waits.

An activation set goes through ``offload``, ``release``, ``prepare``, ``reload`` and ``use`` (or
``finish``). The order that keeps its numbers right is a handful of edges between streams, each
with a name in ``EDGES``; tests remove them one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from .arena import HostArena, Slot
from .blocks import Form, bytes_of, form_of_bytes, padded
from .device import Device, Direction, Event, Pairs

EDGES = {
    "offload-after-forward": "the copy to the host reads what F has written",
    "offload-after-slot-read": "a host place is written only when its last owner's reload is done",
    "release-after-offload": "compute may overwrite device memory only when the copy has read it",
    "reload-after-prepare": "compute is done with a buffer's former content before reload writes",
    "reload-after-offload": "the copy to the host is complete before it is read back",
    "use-after-reload": "backward reads what reload has written",
    "drop-after-reload": "a reloaded buffer that nobody used is not reused under the copy",
    "reuse-after-use": "memory of one compute stream that another one uses is not reused meanwhile",
}


@dataclass(eq=False)
class Ticket:
    """The transfers of one activation set.

    Attributes:
        produced: F has written everything.
        forms: of each of the set's memory blocks.
        host: the blocks in ``slot``.
        stream: compute stream of PREPARE and RELOAD, which allocated the memory to reload to.
        users: compute streams that wait for the reload.
    """

    produced: Event
    forms: tuple[Form, ...] = ()
    host: list[torch.Tensor] = field(default_factory=list)
    slot: Slot | None = None
    sent: Event | None = None
    prepared: Event | None = None
    arrived: Event | None = None
    stream: Hashable = None
    users: set[Hashable] = field(default_factory=set)


@dataclass
class Counters:
    """What the engine has done since it was made."""

    offloads: int = 0
    reloads: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    waited_releases: int = 0
    """Releases at which compute waited for the copy: the link was slower than planned."""
    waited_uses: int = 0
    """First uses at which compute waited for the reload, likewise."""
    waited_seconds: float = 0.0
    """How long it waited at both: from where compute was to the end of the copy."""
    refused: int = 0
    """Sets that stayed because a sealed arena had no place for them."""


class Engine:
    """Moves activation sets between a device and the host arena.

    Args:
        device: hardware, or its emulation; each direction has a copy stream.
    """

    def __init__(self, device: Device, arena: HostArena) -> None:
        self.device, self.arena = device, arena
        self._counters = Counters()
        # Waits whose length the device does not know yet: counter, compute got there, end of copy.
        self._waits: deque[tuple[str, Event, Event]] = deque()

    @property
    def counters(self) -> Counters:
        """Of everything that has happened; the host, which may be ahead, does not wait."""
        while self._waits:
            counter, reached, copied = self._waits[0]
            seconds = self.device.waited(reached, copied)
            if seconds is None:
                break
            self._waits.popleft()
            if seconds > 0:
                setattr(self._counters, counter, getattr(self._counters, counter) + 1)
                self._counters.waited_seconds += seconds
        return self._counters

    def produced(self) -> Ticket:
        """A ticket for the set whose forward pass compute has just been given."""
        return Ticket(self.device.record())

    def offload(
        self,
        ticket: Ticket,
        blocks: Sequence[torch.Tensor],
        reserve_bytes: int = 0,
        forms: Sequence[Form] | None = None,
    ) -> bool:
        """Start copying ``blocks`` to the host.

        Args:
            blocks: what it consists of: device memory, each of a dense form.
            reserve_bytes: take a place of at least so many bytes: sets of one kind that vary in
                size must not leave gaps in the arena that the next one cannot use.
            forms: of the blocks; None: they are 1-D uint8.

        Returns:
            False if a sealed arena has no place: nothing was started, and the set has to stay.

        Raises:
            OffloadConfigError: the arena had to grow and the host lacks the memory.
        """
        if forms is None:
            forms = [form_of_bytes(block.numel()) for block in blocks]
        sizes = [form.end_bytes for form in forms]
        slot = self.arena.allocate(max(sum(map(padded, sizes)), reserve_bytes))
        if slot is None:
            self._counters.refused += 1
            return False
        ticket.forms, ticket.slot = tuple(forms), slot
        ticket.host = slot.views(ticket.forms)
        after = self._edge("offload-after-forward", ticket.produced)
        for read in slot.busy:
            after += self._edge("offload-after-slot-read", read)
        ticket.sent = self._copy(Direction.TO_HOST, list(zip(ticket.host, blocks)), after)
        self._counters.offloads += 1
        self._counters.bytes_to_host += sum(sizes)
        return True

    def release(
        self, ticket: Ticket, memory: list[torch.Tensor] | None = None, foreign: bool = False
    ) -> None:
        """Drop the device's copy of the set.

        If the copy to the host is not complete, compute waits for it, so that the memory is free
        when the schedule says so.

        Args:
            memory: nobody else has it; emptied, the last one first. None: the caller drops it.
            foreign: it may be another compute stream's, which does not wait for the copy.
        """
        assert ticket.sent is not None
        if not ticket.sent.query():
            self._watch("waited_releases", ticket.sent)
            self._compute_waits("release-after-offload", ticket.sent)
        while memory:
            dropped = memory.pop()
            if foreign:
                self._in_use("reuse-after-use", dropped)
            self.device.discard(dropped)
            del dropped

    def prepare(
        self, ticket: Ticket, buffers: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Device memory for the set's blocks, in the order and forms of ``offload``.

        Args:
            buffers: such memory; None: it is allocated.
        """
        if buffers is None:
            buffers = [self.device.allocate(form.end_bytes, form) for form in ticket.forms]
        ticket.prepared = self.device.record()
        return buffers

    def reload(self, ticket: Ticket, buffers: Sequence[torch.Tensor | None]) -> None:
        """Start copying back into ``buffers``, in the order of ``offload`` (None: not needed any
        more), and free the place on the host."""
        assert ticket.sent is not None and ticket.prepared is not None and ticket.slot is not None
        pairs = [(b, host) for b, host in zip(buffers, ticket.host) if b is not None]
        after = self._edge("reload-after-prepare", ticket.prepared)
        after += self._edge("reload-after-offload", ticket.sent)
        ticket.arrived = self._copy(Direction.TO_DEVICE, pairs, after)
        ticket.stream = self.device.stream()
        self.arena.free(ticket.slot, ticket.arrived)
        ticket.slot, ticket.host = None, []
        counters = self.counters  # By now earlier waits are over.
        counters.reloads += 1
        counters.bytes_to_device += sum(
            form.end_bytes for b, form in zip(buffers, ticket.forms) if b is not None
        )

    def use(self, ticket: Ticket, storage: torch.UntypedStorage | None = None) -> bool:
        """What this thread gives to compute from now on may read the reloaded blocks.

        To be called for every use: autograd may run it on another stream than the last one.

        Args:
            storage: that is used, if it was reloaded and may be dropped before ``finish``.

        Returns:
            True if the stream that allocated the memory waits for the reload: blocks that nobody
            uses may be dropped from here on.
        """
        assert ticket.arrived is not None
        stream = self.device.stream()
        if stream not in ticket.users:
            if not ticket.users and not ticket.arrived.query():
                self._watch("waited_uses", ticket.arrived)
            ticket.users.add(stream)
            self._compute_waits("use-after-reload", ticket.arrived)
        if storage is not None and stream != ticket.stream:
            self._in_use("reuse-after-use", bytes_of(storage))
        return ticket.stream in ticket.users

    def finish(self, ticket: Ticket) -> None:
        """The set is not needed any more, however far it came; its memory may be dropped."""
        pending = ticket.arrived if ticket.arrived is not None else ticket.sent
        if pending is not None and ticket.stream not in ticket.users and not pending.query():
            self._compute_waits("drop-after-reload", pending)
        if ticket.slot is not None:
            self.arena.free(ticket.slot, pending)
            ticket.slot, ticket.host = None, []

    def synchronize(self) -> None:
        """The host waits for every copy: after errors and at the end only."""
        self.device.synchronize()

    def close(self) -> None:
        """End copies and threads, unpin host memory."""
        self.device.synchronize()
        self.device.close()
        self.arena.close()

    def _copy(
        self,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Event],
    ) -> Event:
        stream = int(direction is Direction.TO_DEVICE)
        return self.device.copy(stream, direction, pairs, after)

    def _watch(self, counter: str, copied: Event) -> None:
        """Compute is about to wait for a copy that the host, which is ahead, sees unfinished."""
        self._waits.append((counter, self.device.record(timed=True), copied))

    # Every edge is one of these, by its name.

    def _edge(self, name: str, event: Event) -> list[Event]:
        return [event]

    def _compute_waits(self, name: str, event: Event) -> None:
        self.device.wait(event)

    def _in_use(self, name: str, memory: torch.Tensor) -> None:
        self.device.record_use(memory)
