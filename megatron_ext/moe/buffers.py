"""Memory of a chunk's tensors: rings that all layers share, transfers to the host, and what each
chunk keeps from its forward for its backward pass.

A ring has a buffer for each purpose and slot; chunk i uses slot i mod depth. Buffers only grow, to
what the worst chunk of any rank needs, so after the first steps nothing is allocated any more.
The host arena has one size for the whole run; a chunk that finds no room there stays on the device.
Compute and the collectives are ordered by issue; copies to the host are not, and a slot knows the
events that its next writer has to wait for (MPipeMoE, section III-D).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..offload.arena import HostArena
from ..offload.blocks import Block, Form, Kept, laid_out, padded
from ..offload.device import Device, Event, device_for
from ..offload.engine import Engine, Ticket
from ..offload.saved import Selection, smallest
from ..offload.sets import NO_ROOM, ActivationSet, State
from .graph import Linears, Recomputation, without_memory
from .plan import DEPTH, Restore, Strategy

logger = logging.getLogger(__name__)

INPUT, INSIDE = "input", "inside"
MIN_BYTES = 4096
_PAGE = 2 << 20  # what a device allocates at least; larger buffers grow to multiples of it
_GROWTH = 10  # a buffer that has to grow gets a tenth more than is needed
_HEADROOM = 1.25


@dataclass
class _Slot:
    memory: torch.Tensor | None = None
    readers: list[Event] = field(default_factory=list)


class Ring:
    """The buffers of one rank.

    Args:
        device: orders copies and compute.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._wanted: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that there are."""
        return sum(s.memory.numel() for s in self._slots.values() if s.memory is not None)

    def reserve(self, purpose: str, nbytes: int) -> None:
        """From now on buffers of ``purpose`` have at least so many bytes."""
        self._wanted[purpose] = max(nbytes, self._wanted.get(purpose, 0))

    def take(self, purpose: str, number: int, nbytes: int) -> torch.Tensor:
        """The memory of a slot, 1-D uint8, at least ``nbytes``; compute may write to it.

        Each call gives a tensor of its own over the slot, with its own version counter: autograd
        must not take the next chunk's writing for a change of this one's saved tensors.
        """
        slot = self._slots.setdefault((purpose, number), _Slot())
        self._wait_for(slot.readers, purpose)
        slot.readers.clear()
        nbytes = max(nbytes, self._wanted.get(purpose, 0))
        if slot.memory is None or slot.memory.numel() < nbytes:
            grows, slot.memory = slot.memory is not None, None  # never two at the same time
            slot.memory = self.device.allocate(_grown(nbytes) if grows else nbytes)
        fresh = torch.empty(0, dtype=torch.uint8, device=slot.memory.device)
        return fresh.set_(slot.memory.untyped_storage(), 0, (slot.memory.numel(),), (1,))

    def _wait_for(self, readers: Sequence[Event], purpose: str) -> None:
        for event in readers:
            if not event.query():
                self.device.wait(event)

    def read_until(self, purpose: str, number: int, event: Event) -> None:
        """A slot is read by a copy until ``event``."""
        self._slots[purpose, number].readers.append(event)

    def leave(self) -> None:
        """Give slots other memory next time: collectives may be using what they had, and keep it
        until they are over. Of the experts' input, too, which experts may have returned."""
        self._slots.clear()

    def clear(self) -> None:
        """Release all memory; compute waits for copies that still read it."""
        for slot in self._slots.values():
            for event in slot.readers:
                self.device.wait(event)
        self._slots.clear()
        self._wanted.clear()


def _grown(nbytes: int) -> int:
    """Bytes to allocate, so that a maximum that creeps up over the steps reallocates rarely."""
    nbytes = padded(nbytes + nbytes // _GROWTH)
    return -(-nbytes // _PAGE) * _PAGE if nbytes > _PAGE else nbytes


class Departures:
    """What is on its way to the host from memory that no ring owns: at most ``DEPTH`` chunks'.

    Without a bound a slow link would keep all chunks' memory; with it, compute waits for the link
    as it would for a slot.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._departing: list[tuple[Ticket, list[torch.Tensor]]] = []

    def add(self, ticket: Ticket, memory: list[torch.Tensor]) -> None:
        """Hold ``memory`` until the copy of ``ticket`` is done."""
        self._departing.append((ticket, memory))

    def make_room(self) -> None:
        """Before another chunk computes: free what is copied; wait where too much is not."""
        while self._departing:
            sent = self._departing[0][0].sent
            assert sent is not None
            if len(self._departing) < DEPTH and not sent.query():
                return
            self._free_first()

    def flush(self) -> None:
        """Free everything; compute waits for copies that are not done."""
        while self._departing:
            self._free_first()

    def _free_first(self) -> None:
        self._engine.release(*self._departing.pop(0))


class Memory:
    """The memory that all MoE layers of one rank share: ring buffers, host arena, copy streams.

    The first step that copies is also a measurement: until it is over the host arena grows. From
    then on it is one piece with a quarter more, for routing that is not balanced; a chunk that
    finds no room there stays on the device.

    Args:
        device: of the layers.
        min_bytes: storages smaller than this are not worth a copy and stay on the device.

    Attributes:
        stayed: chunks that stayed on the device, since the host arena had no room.
        rows: of the experts, that are held for backward. most_rows: in this step.
    """

    def __init__(self, device: Device, min_bytes: int = MIN_BYTES) -> None:
        self.device, self.min_bytes, self.ring = device, min_bytes, Ring(device)
        self.engine = Engine(device, HostArena(device.torch_device))
        self.departures = Departures(self.engine)
        self.stayed = self.rows = self.most_rows = 0
        self._sized = False

    def begin_step(self) -> None:
        """Give the host arena its size once a step has shown it. Between steps only.

        Raises:
            OffloadConfigError: the host lacks the memory.
        """
        arena = self.engine.arena
        if not self._sized and arena.peak_bytes and not arena.used_bytes:
            arena.resize(round(_HEADROOM * arena.peak_bytes))
            self._sized = True
        self.rows = self.most_rows = 0

    def hold(self, rows: int) -> None:
        """A call keeps so many rows of its experts for backward; fewer than 0: no longer."""
        self.rows += rows
        self.most_rows = max(self.most_rows, self.rows)

    def offload(self, record: Record, pieces: Sequence[torch.Tensor]) -> None:
        """Start copying a chunk's blocks and ``pieces`` to the host, or note that they stay."""
        record.offload(more=pieces)
        if record.stays == NO_ROOM:
            if not self.stayed:
                logger.warning(
                    "a chunk of an MoE layer has found no room in the host arena of %d bytes: it, "
                    "and others like it, stay on the device",
                    self.engine.arena.capacity_bytes,
                )
            self.stayed += 1

    @classmethod
    def on(cls, device: torch.device, **options: Any) -> Memory:
        """For layers with tensors on ``device``."""
        return cls(device_for(device), **{"min_bytes": smallest(MIN_BYTES), **options})

    def close(self) -> None:
        """Wait for copies and release everything."""
        self.departures.flush()
        self.engine.close()
        self.ring.clear()


class Record(ActivationSet):
    """One chunk between its forward and its backward pass.

    The experts' graph holds it, through the hooks; so it must not hold the graph, or neither would
    go where there is no backward pass.

    Args:
        strategy: how it comes back.
        selection: of tensors inside the experts that may leave.

    Attributes:
        used_bytes: of the chunk's slot of the ring ``input``.
    """

    def __init__(
        self,
        memory: Memory,
        number: int,
        strategy: Strategy,
        selection: Selection,
    ) -> None:
        super().__init__(f"MoE chunk {number}", memory.engine, selection)
        self.used_bytes = 0
        self._memory, self._strategy = memory, strategy
        self._number = number % DEPTH
        self._input: Block | None = None
        self._given = 0  # identity of the storage of the experts' input
        self._again: Recomputation | None = None
        self._slot: torch.Tensor | None = None

    def __del__(self) -> None:
        # A graph may be dropped without a backward pass; its place on the host must not be lost.
        if self.ticket is not None and self.ticket.slot is not None:
            self.engine.arena.drop(self.ticket.slot, self.ticket.sent)

    # --- forward ---

    def input_slot(self, nbytes: int) -> torch.Tensor:
        """Memory for the experts' input, 1-D uint8: of its own, or of the ring."""
        self.used_bytes = nbytes
        if self._strategy.input is Restore.KEEP:
            return self._memory.device.allocate(nbytes)
        return self._memory.ring.take(INPUT, self._number, nbytes)[:nbytes]

    @contextlib.contextmanager
    def saving(self, slot: torch.Tensor, linears: Linears) -> Iterator[Recomputation | None]:
        """A context for the experts' forward pass: what autograd saves there is this chunk's.

        Args:
            slot: what ``input_slot`` gave.
            linears: of the experts, for what is computed again.

        Yields:
            What computes it again; None where nothing is.

        Raises:
            RuntimeError: the experts wrote into their input, which comes back without that.
        """
        inside, storage = self._strategy.inside, slot.untyped_storage()
        if inside is Restore.KEEP:
            with _without_checkpoint():
                yield None
            return
        self._given = storage._cdata
        if self._strategy.input is not Restore.KEEP:
            self._input = Block(self.key, storage)
            self._input.add(slot)
        with contextlib.ExitStack() as stack:
            if self._strategy.recomputes:
                residents, whole = self.contents.selection.residents(), inside is Restore.RECOMPUTE
                self._again = Recomputation(self.key, residents, linears, whole)
                stack.enter_context(self._again.recording(slot))
            stack.enter_context(self.hooks())
            yield self._again
        self._again = None
        if self._input is not None:
            self._input.check()
            self._input.drop()

    def depart(self, slot: torch.Tensor) -> None:
        """The experts' forward pass has been issued: send to the host what is to go there."""
        ring = self._memory.ring
        sends_input = self._strategy.input is Restore.OFFLOAD and self.used_bytes
        pieces = [slot[: self.used_bytes]] if sends_input else []
        if not pieces and not self.contents.blocks:
            return
        self.ticket = self.engine.produced()
        self._memory.offload(self, pieces)
        if self.stays:
            if pieces:  # out of the ring
                self._slot = self._memory.device.allocate(self.used_bytes)
                self._slot.copy_(slot[: self.used_bytes])
            return
        assert self.ticket.sent is not None
        if pieces:
            ring.read_until(INPUT, self._number, self.ticket.sent)
        if inside := self.let_go():
            self._memory.departures.add(self.ticket, inside)

    # --- backward ---

    @property
    def copied_inside_bytes(self) -> int:
        """Of the chunk's slot of the ring ``inside``, once ``depart`` has run."""
        return sum(padded(form.end_bytes) for form in self._inside_forms())

    def _inside_forms(self) -> Sequence[Form]:
        return () if self.ticket is None else self.ticket.forms[: len(self.offloaded)]

    def fetch(self) -> None:
        """Start copying back what is on the host, into the ring."""
        if not self.on_host:
            return
        buffers, ring, forms = list[torch.Tensor](), self._memory.ring, self._inside_forms()
        if forms:
            inside = ring.take(INSIDE, self._number, self.copied_inside_bytes)
            buffers = laid_out(inside, forms)
        if self._strategy.input is Restore.OFFLOAD and self.used_bytes:
            self._slot = self.input_slot(self.used_bytes)
            buffers.append(self._slot)
        self.prepare(buffers)
        self.reload()

    def backward_slot(self) -> torch.Tensor:
        """The experts' input in backward: what the copy brings, or room for what is sent again."""
        slot, self._slot = self._slot, None
        return self.input_slot(self.used_bytes) if slot is None else slot

    def begin(self, slot: torch.Tensor) -> None:
        """The experts' backward pass is about to be issued, with its input in ``slot``."""
        if self.state is State.RELOADING:
            self.use()
        if self._input is not None:
            self._input.memory = slot

    def finish(self) -> None:
        """The experts' backward pass has been issued: forget everything."""
        super().finish()
        self._input = None

    # --- autograd's side ---

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata == self._given and self._input is not None:
            return without_memory(self._input, tensor)
        if self._again is not None:
            return self._again.pack(tensor)
        return super()._pack(tensor)


def _without_checkpoint() -> contextlib.AbstractContextManager[Any]:
    """Inside, no checkpoint of PyTorch takes saved tensors: it would compute the layer again for
    each graph that asks for some, chunk after chunk, in buffers that hold a chunk on its way. Other
    hooks, of a user or of PipeOffload, take them."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Kept, lambda handle: handle.tensor)
