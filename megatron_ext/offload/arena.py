"""Pinned host memory, allocated up front, from which activation sets get places.

torch's own pinned allocator rounds every block up to a power of two, and pinning memory in the
middle of training stops the device. Here pages are pinned in place, once, and divided by byte
ranges.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .blocks import Form, laid_out, padded
from .device import Event
from .errors import OffloadConfigError
from .host import bound_to_numa_node, host_pages, pci_bus_id, require_host_memory
from .host_memory import GIB, available_host_bytes

# Tensors over places that are kept for the next set of the same forms; then all are made again.
_KEPT_VIEWS = 16384
# Memory that is less than this times what is needed is not replaced by a smaller piece.
_AMPLE = 1.25


class FreeList:
    """First-fit allocation of byte ranges of [0, ``nbytes``)."""

    def __init__(self, nbytes: int) -> None:
        # Sorted, disjoint, never touching: [start, end).
        self._free = [(0, nbytes)]

    def allocate(self, size: int) -> int | None:
        """Where ``size`` bytes start; None if there is no such place."""
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number : number + 1] = (
                    [(start + size, end)] if start + size < end else []
                )
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Free ``size`` bytes at ``start``."""
        ranges: list[tuple[int, int]] = []
        for first, last in sorted([*self._free, (start, start + size)]):
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
        self._free = ranges


def arena_bytes(moves: Iterable[tuple[Hashable, int]]) -> int:
    """Capacity that an arena needs, so that first fit finds a place for every set.

    Args:
        moves: (set, its bytes) in the order of the steps: a set is allocated where it is named
            first, and freed where it is named again.
    """
    memory, places, most = FreeList(1 << 62), dict[Hashable, tuple[int, int]](), 0
    for key, nbytes in moves:
        if key in places:
            memory.free(*places.pop(key))
            continue
        size = padded(max(nbytes, 1))
        start = memory.allocate(size)
        assert start is not None
        places[key] = start, size
        most = max(most, start + size)
    return most


@dataclass(eq=False)
class _Region:
    memory: torch.Tensor
    free_list: FreeList
    # Ranges freed while a copy still reads them, with that copy's event.
    read: list[tuple[int, int, Event]] = field(default_factory=list)
    views: dict[tuple[int, tuple[Form, ...]], list[torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Slot:
    """A byte range of the arena. ``memory`` is 1-D uint8; copies into it come after ``busy``."""

    memory: torch.Tensor
    busy: list[Event]
    region: Any
    start: int
    end: int

    def views(self, forms: tuple[Form, ...]) -> list[torch.Tensor]:
        """Tensors of these forms, one after the other, each at a multiple of ``ALIGNMENT``."""
        kept: dict[Any, list[torch.Tensor]] = self.region.views
        found = kept.get((self.start, forms))
        if found is None:
            if (1 + len(kept)) * len(forms) > _KEPT_VIEWS:
                kept.clear()
            found = kept[self.start, forms] = laid_out(self.memory, forms)
        return found


class HostArena:
    """Host memory for activation sets that left the device.

    Args:
        device: whose copies it serves: memory is pinned for a CUDA device, on the CPUs next to
            it.
        nbytes: allocated now: (host peak sets) x (padded bytes of a set), known or estimated.
        expected_sets: where bytes are not known before the first forward pass: the first growth
            takes this many times the set that is asked for.

    Raises:
        OffloadConfigError: the host lacks the memory.
    """

    def __init__(self, device: torch.device, nbytes: int = 0, expected_sets: int = 1) -> None:
        self._device, self._expected_sets = device, expected_sets
        self._regions: list[_Region] = []
        self._sealed = False
        self._used_bytes = self.peak_bytes = 0
        self._dropped: deque[tuple[Slot, Event | None]] = deque()
        # Collected with its model, it must not leave freed memory pinned.
        weakref.finalize(self, _unpin, self._regions, device).atexit = False
        if nbytes:
            self._grow(nbytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated (and pinned, for a CUDA device)."""
        return sum(region.memory.numel() for region in self._regions)

    @property
    def used_bytes(self) -> int:
        """Bytes of all places that are not free."""
        self._free_dropped()
        return self._used_bytes

    def expect(self, sets: int) -> None:
        """The next growth takes so many times the set that is asked for; peaks start again."""
        self._expected_sets, self.peak_bytes = sets, self.used_bytes

    def seal(self) -> None:
        """No growth from here on: called at the end of the first step."""
        self._sealed = True

    def allocate(self, nbytes: int) -> Slot | None:
        """A place of ``padded(nbytes)`` bytes; None if there is none and the arena is sealed.

        Raises:
            OffloadConfigError: the arena has to grow and the host lacks the memory.
        """
        self._free_dropped()
        size = padded(max(nbytes, 1))
        slot = self._first_fit(size)
        if slot is None and not self._sealed:
            self._grow(size * self._expected_sets)
            self._expected_sets = 1
            slot = self._first_fit(size)
        if slot is not None:
            self._used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return slot

    def free(self, slot: Slot, read: Event | None = None) -> None:
        """Free a place; copies into it by its next owners come after ``read``."""
        region: _Region = slot.region
        self._used_bytes -= slot.end - slot.start
        if read is not None:
            region.read.append((slot.start, slot.end, read))
        region.free_list.free(slot.start, slot.end - slot.start)

    def drop(self, slot: Slot, read: Event | None) -> None:
        """``free`` for finalizers. Garbage is collected in the middle of anything, of ``allocate``
        and ``free``, too; so the place is free when the next one is asked for."""
        self._dropped.append((slot, read))

    def resize(self, nbytes: int) -> None:
        """Have one piece of at least ``nbytes``, sealed; between steps only.

        Memory that is large enough, and by less than a quarter too large, stays: pinning it again
        would take longer than it is worth.

        Raises:
            RuntimeError: a set has its place in here.
            OffloadConfigError: the host lacks the memory.
        """
        if self.used_bytes:
            raise RuntimeError(f"the host arena still holds {self.used_bytes} bytes of sets")
        fitting = [r for r in self._regions if nbytes <= r.memory.numel() < _AMPLE * nbytes]
        self._drop([region for region in self._regions if region not in fitting[:1]])
        if nbytes and not self._regions:
            self._grow(nbytes)
        self.peak_bytes, self._sealed = 0, True

    def close(self) -> None:
        """Unpin and drop the memory; no slot may be used any more."""
        self._drop(self._regions)

    def _free_dropped(self) -> None:
        while self._dropped:
            self.free(*self._dropped.popleft())

    def _drop(self, regions: Iterable[_Region]) -> None:
        dropped = list(regions)
        _unpin(dropped, self._device)
        for region in dropped:
            self._regions.remove(region)

    def _first_fit(self, size: int) -> Slot | None:
        for region in self._regions:
            start = region.free_list.allocate(size)
            if start is None:
                continue
            end = start + size
            region.read = [entry for entry in region.read if not entry[2].query()]
            busy = [e for first, last, e in region.read if first < end and start < last]
            return Slot(region.memory[start:end], busy, region, start, end)
        return None

    def _grow(self, nbytes: int) -> None:
        size = padded(nbytes)
        require_host_memory([size], available_host_bytes())
        with bound_to_numa_node(pci_bus_id(self._device)):
            memory = host_pages(size)
            if self._device.type == "cuda":
                _pin(memory, self._device)
        self._regions.append(_Region(memory, FreeList(size)))


def _unpin(regions: Iterable[_Region], device: torch.device) -> None:
    """Let the driver forget regions, when no copy reads or writes them any more."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    for region in regions:
        torch.cuda.cudart().cudaHostUnregister(region.memory.data_ptr())


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Page-lock ``memory`` in place, which wastes nothing, unlike ``torch.empty(pin_memory=)``."""
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise OffloadConfigError(
            f"the driver refused to pin {memory.numel() / GIB:.2f} GiB of host memory (CUDA error "
            f"{int(status)}); raise the container's memory and memlock limits (ulimit -l "
            "unlimited) or offload less"
        )
