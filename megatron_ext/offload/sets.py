"""One activation set: which blocks it has, where it is, and what that takes."""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Hashable
from dataclasses import astuple, dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .blocks import Block
from .engine import Ticket

NO_ROOM = "the host arena had no room"
NOTHING = "nothing in it can move"
LATE = "its copy was not complete when it was needed again"


class State(enum.Enum):
    """Where a set is."""

    HERE = "on the device"
    LEAVING = "on the device, being copied to the host"
    AWAY = "on the host"
    PREPARED = "on the host, device memory prepared"
    COMING = "being copied back to the device"
    BACK = "back on the device"


@dataclass(frozen=True)
class SetBytes:
    """Bytes of one set.

    Attributes:
        device: of blocks that occupy device memory now (prepared ones too).
        host: of the set's copy in the arena, as long as its place is taken.
        kept: of tensors saved by reference that never leave.
    """

    device: int
    host: int
    kept: int


@dataclass(frozen=True)
class Footprint:
    """What one set takes, in bytes, after its F: enough to say what any plan needs.

    Attributes:
        here: on the device, from F to RELEASE.
        away: of that, what stays there after RELEASE.
        back: on the device from PREPARE on.
        host: its place in the arena.
    """

    here: int = 0
    away: int = 0
    back: int = 0
    host: int = 0

    def union(self, other: Footprint) -> Footprint:
        """The larger of both, each number for itself."""
        return Footprint(*map(max, astuple(self), astuple(other)))


class ActivationSet:
    """One activation set."""

    def __init__(self, key: Hashable) -> None:
        self.key, self.state = key, State.HERE
        self.ticket: Ticket | None = None
        # Weak: graphs own blocks. Strong only while a copy is under way.
        self.blocks: list[weakref.ref[Block]] = []
        self.moving: list[Block] = []
        self.moved: list[weakref.ref[Block]] = []
        self.buffers: list[torch.Tensor] = []
        self.by_storage: dict[int, weakref.ref[Block]] = {}
        self.kept: Counter[str] = Counter()
        self.gone: list[tuple[StorageWeakRef, int]] = []
        # Why there is no transfer (NO_ROOM, NOTHING, LATE), or "".
        self.stays = ""
        # As of the last action; backward frees blocks meanwhile without telling.
        self.device_bytes = 0
        self.late = False

    def alive(self) -> list[Block]:
        """Blocks that some graph still needs."""
        return [block for ref in self.blocks if (block := ref()) is not None]

    def where(self) -> str:
        """In words, for errors."""
        return f"on the device ({self.stays})" if self.stays else self.state.value


def storage_bytes(block: Block) -> int:
    """Bytes of the storage that a block on the device lies in."""
    assert block.memory is not None
    return block.memory.untyped_storage().nbytes()
