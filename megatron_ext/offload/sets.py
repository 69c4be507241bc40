"""One activation set: its memory blocks, its state, its sizes."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable
from dataclasses import astuple, dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .arena import padded
from .blocks import Block
from .engine import Ticket

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


class ActivationSet:
    """What one model chunk saves for one microbatch.

    Attributes:
        ticket: of its transfers; None until F has ended.
        blocks: one a storage. Weak references, because autograd's graph owns the blocks.
        in_copy: blocks that a copy reads or writes; the set owns them meanwhile.
        offloaded: the blocks that were copied to the host.
        released: storages that RELEASE dropped, with their bytes.
        buffers: device memory between PREPARE and RELOAD.
        stays: why there is no transfer (``NO_ROOM``, ``NOTHING``), or "".
        several_streams: F saved tensors on more than one compute stream.
        device_bytes: as of the last action; backward frees blocks in between.
    """

    def __init__(self, key: Hashable) -> None:
        self.key, self.state = key, State.ON_DEVICE
        self.ticket: Ticket | None = None
        self.blocks: list[weakref.ref[Block]] = []
        self.in_copy: list[Block] = []
        self.offloaded: list[weakref.ref[Block]] = []
        self.released: list[tuple[StorageWeakRef, int]] = []
        self.buffers: list[torch.Tensor] = []
        self.stays = ""
        self.several_streams = False
        self.device_bytes = 0

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
        return [block for ref in self.blocks if (block := ref()) is not None]

    def movable(self) -> list[Block]:
        """Blocks on the device that can be offloaded."""
        return [block for block in self.alive() if block.can_move()]

    def measure(self) -> int:
        """Bytes on the device now, also kept as ``device_bytes``."""
        total = sum(buffer.nbytes for buffer in self.buffers)
        for ref in self.blocks:
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
