"""One activation set: what autograd saves for it, and its way to the host and back.

Autograd holds *handles* of memory *blocks* (one per storage), and a block's memory lives as long as
its handles do. So each tensor is freed inside backward as soon as stock would free it, and what W
passes keep of B's tensors stays valid until W, without the set knowing about W.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .blocks import Block, Kept, form_of_bytes, modified_in_place, padded
from .engine import Engine, Ticket
from .saved import Selection

NO_ROOM = "the host arena had no room"
NOTHING = "nothing in it can move"


class State(enum.Enum):
    """Where a set is."""

    ON_DEVICE = "on the device"
    OFFLOADING = "on the device, being copied to the host"
    ON_HOST = "on the host"
    PREPARED = "on the host, device memory prepared"
    RELOADING = "being copied back to the device"
    RELOADED = "back on the device"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one set, known when its F has ended: all that a plan needs.

    Attributes:
        device: on the device from F to RELEASE, or to the end of W if it is not offloaded.
        kept: of ``device``, what stays there after RELEASE.
        reloaded: on the device from PREPARE on.
        host: its place in the arena.
    """

    device: int = 0
    kept: int = 0
    reloaded: int = 0
    host: int = 0

    def union(self, other: Footprint) -> Footprint:
        """The larger of both, field by field."""
        return Footprint(*map(max, astuple(self), astuple(other)))


class _Contents:
    """What autograd saves for a set.

    Attributes:
        blocks: one a storage. Weak references, because autograd's graph owns the blocks.
        several_streams: tensors were saved on more than one compute stream.
        selection: of tensors that may leave.
    """

    def __init__(self, key: Hashable, engine: Engine, selection: Selection) -> None:
        self.blocks: list[weakref.ref[Block]] = []
        self.several_streams = False
        self._key, self.selection = key, selection
        self._current_stream = engine.device.stream
        self._stream = self._current_stream()
        # By identity, not address: memory freed inside the pass may come back as another storage.
        self._by_storage: dict[int, weakref.ref[Block]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""
        selection = self.selection
        reason = selection.why_not(tensor)
        if reason is not None:
            selection.kept_bytes[reason] += tensor.numel() * tensor.element_size()
            return Kept(tensor)
        if self._current_stream() != self._stream:
            self.several_streams = True
        storage = tensor.untyped_storage()
        ref = self._by_storage.get(storage._cdata)
        block = ref() if ref is not None else None
        if block is None:
            block = Block(self._key, storage)
            self._by_storage[storage._cdata] = weakref.ref(block)
            self.blocks.append(weakref.ref(block))
        if selection.keep is not None and selection.keep(tensor):
            selection.kept_bytes["policy"] += tensor.numel() * tensor.element_size()
            # All of the storage: what another module saves of it cannot free it alone.
            block.stays = True
        return block, block.add(tensor)


class ActivationSet:
    """What one model chunk saves for one microbatch, or the experts of an MoE layer for one chunk.

    Args:
        key: its name.
        engine: of its transfers.
        selection: of tensors that may leave.

    Attributes:
        ticket: of its transfers; None until F has ended.
        contents: what autograd saves for it.
        in_copy: blocks that a copy reads or writes; the set owns them meanwhile.
        offloaded: the blocks that were copied to the host.
        stays: why there is no transfer (``NO_ROOM``, ``NOTHING``), or "".
        device_bytes: as of the last action; backward frees blocks in between.
    """

    def __init__(self, key: Hashable, engine: Engine, selection: Selection) -> None:
        self.key, self.engine, self.state = key, engine, State.ON_DEVICE
        self.ticket: Ticket | None = None
        self.contents = _Contents(key, engine, selection)
        self.in_copy: list[Block] = []
        self.offloaded: list[weakref.ref[Block]] = []
        self.buffers: list[torch.Tensor] = []
        self.stays = ""
        self.device_bytes = 0

    # --- autograd's side ---

    def hooks(self) -> Any:
        """A context in which autograd saves tensors for the set."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        return self.contents.pack(tensor)

    def _unpack(self, handle: Any) -> torch.Tensor:
        if isinstance(handle, Kept):
            tensor = handle.tensor
            if handle.version is not None and tensor._version != handle.version:
                raise modified_in_place(
                    None, tensor, handle.version, tensor._version, handle.origin
                )
            return tensor
        block, number = handle
        if self.state in (State.RELOADING, State.RELOADED) and not self.stays:
            # What stayed is not ours to record.
            self.use(block.storage if block.views[number].tensor is None else None)
        if block.storage is None:
            raise RuntimeError(
                f"backward needs activation set {self.key}, which is {self.where()}: the "
                "schedule has no RELOAD for it before this pass"
            )
        result: torch.Tensor = block.view(number)
        return result

    # --- its way; each method after the one before it ---

    def offload(self, reserve_bytes: int = 0, more: Sequence[torch.Tensor] = ()) -> None:
        """Start copying what can move to the host; ``stays`` says why nothing does.

        Args:
            reserve_bytes: as for ``Engine.offload``.
            more: other memory to copy behind the blocks, 1-D uint8.

        Raises:
            RuntimeError: a saved tensor was written in place.
            OffloadConfigError: the first step needs more host memory than there is.
        """
        blocks = self.movable()
        for block in blocks:
            block.check()
        saved, forms = [block.saved() for block in blocks], [block.form for block in blocks]
        if more:
            saved += more
            forms += [form_of_bytes(each.numel()) for each in more]
        assert self.ticket is not None
        if not saved:
            self.stays = NOTHING
        elif not self.engine.offload(self.ticket, saved, reserve_bytes, forms):
            self.stays = NO_ROOM
        else:
            self.in_copy, self.offloaded = blocks, [weakref.ref(block) for block in blocks]
        self.state = State.OFFLOADING

    def let_go(self) -> list[torch.Tensor]:
        """The device's copy is for the caller to drop: memory of each block."""
        self.state = State.ON_HOST
        blocks, self.in_copy = self.in_copy, []
        return [block.drop() for block in blocks]

    def prepare(self, buffers: list[torch.Tensor] | None = None) -> None:
        """Device memory for the set, as for ``Engine.prepare``."""
        self.state = State.PREPARED
        if not self.stays:
            assert self.ticket is not None
            self.buffers = self.engine.prepare(self.ticket, buffers)

    def reload(self) -> None:
        """Start copying the set back."""
        self.state = State.RELOADING
        if self.stays:
            return
        assert self.ticket is not None
        # A graph may have been dropped meanwhile; what it saved is not worth copying.
        blocks = [ref() for ref in self.offloaded]
        more = self.buffers[len(blocks) :]
        buffers = [b if block is not None else None for block, b in zip(blocks, self.buffers)]
        self.engine.reload(self.ticket, [*buffers, *more])
        for block, buffer in zip(blocks, buffers):
            if block is not None:
                assert buffer is not None
                block.reloaded(buffer)
        self.buffers = []
        # Until compute waits for the copy, nobody may free what it writes to.
        self.in_copy = [block for block in blocks if block is not None]

    def use(self, storage: torch.UntypedStorage | None = None) -> None:
        """Compute is about to read what was reloaded, see ``Engine.use``."""
        assert self.ticket is not None
        self.state = State.RELOADED
        if self.engine.use(self.ticket, storage):
            # From here on each block lives as long as autograd, or W, needs it.
            self.in_copy = []

    def finish(self) -> None:
        """It is not needed any more, however far it came."""
        if self.ticket is not None:
            self.engine.finish(self.ticket)
        self.in_copy, self.buffers = [], []

    # --- questions ---

    @property
    def on_device(self) -> bool:
        """True if it counts as a set on the device, which it does except on the host."""
        return self.state is not State.ON_HOST or self.stays == NO_ROOM

    @property
    def on_host(self) -> bool:
        """True if it has a place in the arena."""
        return self.ticket is not None and self.ticket.slot is not None

    def where(self) -> str:
        """Its state in words, for errors."""
        return f"on the device ({self.stays})" if self.stays else self.state.value

    def alive(self) -> list[Block]:
        """Blocks that a graph still needs."""
        return [block for ref in self.contents.blocks if (block := ref()) is not None]

    def movable(self) -> list[Block]:
        """Blocks on the device that can be offloaded."""
        return [block for block in self.alive() if block.can_move()]

    def measure(self) -> int:
        """Bytes on the device now, also kept as ``device_bytes``."""
        total = sum(buffer.nbytes for buffer in self.buffers)
        for ref in self.contents.blocks:
            if (block := ref()) is not None and block.storage is not None:
                total += block.storage.nbytes()
        self.device_bytes = total
        return total

    def footprint(self) -> Footprint:
        """Its sizes, between F and OFFLOAD."""
        movable, device = self.movable(), self.measure()
        kept = device - sum(block.storage_bytes() for block in movable)
        saved = [block.form.end_bytes for block in movable]
        return Footprint(device, kept, kept + sum(saved), sum(map(padded, saved)))
