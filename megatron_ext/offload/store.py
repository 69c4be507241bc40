"""The activation store: what autograd saves in one forward pass, and where it is now.

One *set* is what one model chunk keeps for one microbatch. The schedule moves it::

    F: with store.saving(key)   OFFLOAD   RELEASE   PREPARE   RELOAD   B   W: store.finish(key)

Autograd holds *handles* of memory *blocks* (one per storage), and a block's memory lives as long as
its handles do. So each tensor is freed inside backward as soon as stock would free it, and what W
passes keep of B's tensors stays valid until W, without the store knowing about W.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .arena import padded
from .blocks import Block, Kept, View, place, written
from .engine import Engine
from .sets import (
    LATE,
    NO_ROOM,
    NOTHING,
    ActivationSet,
    Footprint,
    SetBytes,
    State,
    storage_bytes,
)

# A copy has a fixed cost, and norms' statistics are not worth it.
MIN_BYTES = 64 * 1024
# Of the bytes between the first and the last saved one of a storage.
MIN_COVERAGE = 0.5
# Transformer Engine (2.x; 1.x for weights) and megatron-core mark tensors that must not move.
MARKS = ("_TE_do_not_offload", "_do_not_offload", "weight_offloading")


class ActivationStore:
    """Keeps and moves the activation sets of one rank.

    Args:
        engine: moves them.
        resident: tensors that outlive a set (parameters, buffers); they, and views of their
            storages, are saved by reference. Asked at the start of every step.
        min_bytes: storages smaller than this stay.
        min_coverage: a storage of which less than this fraction is saved stays.
        keep: for tensors to keep on the device that nothing else tells (rotary tables, masks, FP8
            weight caches): they are shared by sets, and moving them frees nothing.
        patient: never let compute wait at RELEASE; memory that is late is dropped at the next
            call after its copy is done, and ``late_releases`` counts it.
    """

    def __init__(
        self,
        engine: Engine,
        resident: Callable[[], Iterable[torch.Tensor]] = tuple,
        *,
        min_bytes: int = MIN_BYTES,
        min_coverage: float = MIN_COVERAGE,
        keep: Callable[[torch.Tensor], bool] | None = None,
        patient: bool = False,
    ) -> None:
        self.engine = engine
        self._resident_tensors, self._keep, self._patient = resident, keep, patient
        self._min_bytes, self._min_coverage = min_bytes, min_coverage
        self._resident: dict[int, dict[tuple[Any, ...], torch.Tensor]] | None = None
        self._sets: dict[Hashable, ActivationSet] = {}
        # Storages that were released and lived on: somebody shares them, and moving them is vain.
        self._shared: dict[int, StorageWeakRef] = {}
        self._open: ActivationSet | None = None
        self.late_releases = 0
        self.peak_device_sets = self.peak_host_sets = 0
        self.peak_device_bytes = 0
        """Of blocks, a set counted whole until it is finished, as the plan does."""
        self.kept: Counter[str] = Counter()
        """Bytes saved by reference, by reason, since the store was made."""
        self.held_elsewhere_bytes = 0
        """Bytes released by the store that somebody else kept alive until reload: not saved."""

    # --- one forward pass ---

    @contextmanager
    def saving(self, key: Hashable) -> Iterator[None]:
        """What autograd saves inside the block becomes the set ``key``.

        Without gradients (evaluation) this does nothing at all. After an exception the set is
        forgotten and no hook stays behind.

        Raises:
            RuntimeError: nested use, or the set exists already.
        """
        if not torch.is_grad_enabled():
            yield
            return
        if self._open is not None or key in self._sets:
            what = "another set is being saved" if self._open else "its last pass is not finished"
            raise RuntimeError(f"activation set {key} cannot be saved: {what}")
        self._poll()
        record = ActivationSet(key)
        self._open = self._sets[key] = record
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self._pack, record), self._unpack
        )
        try:
            with hooks:
                yield
            record.ticket = self.engine.produced()
        except BaseException:
            del self._sets[key]
            raise
        finally:
            self._open = None
            record.by_storage.clear()
        self._count(record)

    # --- the schedule's actions ---

    def offload(self, key: Hashable, reserve_bytes: int = 0) -> None:
        """OFFLOAD: start copying the set to the host.

        A sealed arena without room makes the set stay, which ``report`` counts. ``reserve_bytes``
        as for ``Engine.offload``.

        Raises:
            RuntimeError: a saved tensor was written in place, or the set is not on the device.
            OffloadConfigError: the first step needs more host memory than there is.
        """
        record = self._get(key, "offload", State.HERE)
        blocks = [block for block in record.alive() if self._can_move(block)]
        assert record.ticket is not None
        memory = []
        for block in blocks:
            for view in block.views:
                view.check(key)
            start, end = block.range_bytes()
            assert block.memory is not None
            memory.append(block.memory[start:end])
        if not memory:
            record.stays = NOTHING
        elif not self.engine.offload(record.ticket, memory, reserve_bytes):
            record.stays = NO_ROOM
        else:
            record.moving, record.moved = blocks, [weakref.ref(block) for block in blocks]
        record.state = State.LEAVING

    def release(self, key: Hashable) -> None:
        """RELEASE: the device's copy is dropped; compute waits if it has not been copied yet.

        Raises:
            RuntimeError: a saved tensor was written in place, or OFFLOAD is missing.
        """
        record = self._get(key, "release", State.LEAVING)
        record.state = State.AWAY
        if record.stays:
            return
        assert record.ticket is not None
        if self.engine.release(record.ticket, self._patient):
            self._drop(record)
        else:
            record.late = True
            self.late_releases += 1
        self._count(record)

    def prepare(self, key: Hashable) -> None:
        """PREPARE: allocate device memory for the set, on the compute stream.

        Raises:
            RuntimeError: RELEASE is missing.
        """
        record = self._get(key, "prepare", State.AWAY)
        record.state = State.PREPARED
        if record.late:
            # It never left; dropping it now only to fetch it again would help nobody.
            record.late, record.stays = False, LATE
            record.moving = []
        if not record.stays:
            assert record.ticket is not None
            for ref, nbytes in record.gone:
                if not ref.expired():
                    self.held_elsewhere_bytes += nbytes
                    self._shared[ref.cdata] = ref
            record.gone = []
            record.buffers = self.engine.prepare(record.ticket)
        self._count(record)

    def reload(self, key: Hashable) -> None:
        """RELOAD: start copying the set back.

        Raises:
            RuntimeError: PREPARE is missing.
        """
        record = self._get(key, "reload", State.PREPARED)
        record.state = State.COMING
        if record.stays:
            return
        assert record.ticket is not None
        # A graph may have been dropped meanwhile; what it saved is not worth copying.
        moved = [ref() for ref in record.moved]
        buffers = [b if block is not None else None for block, b in zip(moved, record.buffers)]
        self.engine.reload(record.ticket, buffers)
        for block, buffer in zip(moved, buffers):
            if block is not None:
                block.base_bytes = block.range_bytes()[0]
                block.memory = buffer
        record.buffers = []
        # Until compute waits for the copy, nobody may free what it writes to.
        record.moving = [block for block in moved if block is not None]

    def finish(self, key: Hashable) -> None:
        """After the set's last pass, W or BW: forget it.

        Memory that the graph or anybody else still holds stays valid.

        Raises:
            RuntimeError: the set is on the host: RELOAD is missing, so B cannot have run.
        """
        record = self._sets.get(key)
        if record is None:
            raise RuntimeError(f"there is no activation set {key} to finish")
        if record.state in (State.AWAY, State.PREPARED) and not record.stays and not record.late:
            raise RuntimeError(f"activation set {key} cannot be finished: it is {record.where()}")
        if record.ticket is not None:
            self.engine.finish(record.ticket)
        record.moving = []
        record.late = False
        del self._sets[key]
        self._poll()

    def end_step(self) -> None:
        """After the last action of an iteration; from the first one on the arena stays as it is.

        Raises:
            RuntimeError: a set was never finished.
        """
        if self._sets:
            left = ", ".join(f"{key} ({r.where()})" for key, r in self._sets.items())
            raise RuntimeError(f"an iteration ended with activation sets left over: {left}")
        self.engine.arena.seal()
        self._resident = None
        self._shared = {at: ref for at, ref in self._shared.items() if not ref.expired()}

    def reset_peaks(self) -> None:
        """Count peaks anew, from the sets that there are."""
        self.peak_device_sets, self.peak_host_sets = self.device_sets(), self.host_sets()
        self.peak_device_bytes = sum(record.device_bytes for record in self._sets.values())

    def clear(self) -> None:
        """After an exception: wait for copies under way and forget all sets."""
        records = list(self._sets.values())
        self._sets.clear()
        self._resident = None
        try:
            self.engine.synchronize()
        finally:
            for record in records:
                if record.ticket is not None:
                    self.engine.finish(record.ticket)
                record.moving, record.buffers = [], []

    # --- questions ---

    def state(self, key: Hashable) -> State:
        """Where a set is; KeyError if there is none."""
        return self._sets[key].state

    def set_bytes(self, key: Hashable) -> SetBytes:
        """Bytes of one set; KeyError if there is none."""
        record = self._sets[key]
        slot = record.ticket.slot if record.ticket is not None else None
        host = slot.end - slot.start if slot is not None else 0
        return SetBytes(self._device_bytes(record), host, sum(record.kept.values()))

    def footprint(self, key: Hashable) -> Footprint:
        """Bytes of a set whose F has just ended; KeyError if there is none."""
        record = self._sets[key]
        blocks = [block for block in record.alive() if self._can_move(block)]
        here = self._device_bytes(record)
        away = here - sum(storage_bytes(block) for block in blocks)
        ranges = [end - start for start, end in (block.range_bytes() for block in blocks)]
        return Footprint(here, away, away + sum(ranges), sum(map(padded, ranges)))

    def __len__(self) -> int:
        return len(self._sets)

    def device_sets(self) -> int:
        """Sets that occupy device memory: from F to the end of W, except on the host."""
        here = 0
        for record in self._sets.values():
            away = record.state is State.AWAY and not record.late
            here += int(not away or record.stays in (NO_ROOM, LATE))
        return here

    def host_sets(self) -> int:
        """Sets with a place in the arena."""
        tickets = [record.ticket for record in self._sets.values()]
        return sum(1 for ticket in tickets if ticket is not None and ticket.slot is not None)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The resident tensor (a Parameter, with its attributes) that ``tensor`` is, or itself.

        Under saved-tensor hooks autograd hands back a new tensor for a saved parameter: without
        ``main_grad``, and with a ``.grad`` that nobody reads.
        """
        storage = self._residents().get(tensor.untyped_storage()._cdata, {})
        return storage.get(place(tensor), tensor)

    def report(self) -> dict[str, Any]:
        """Numbers for a log or a trace: bytes, sets, and how the transfers went."""
        arena = self.engine.arena
        return {
            "peak_device_sets": self.peak_device_sets,
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_sets": self.peak_host_sets,
            "arena_bytes": arena.capacity_bytes,
            "arena_peak_bytes": arena.peak_bytes,
            "late_releases": self.late_releases,
            "held_elsewhere_bytes": self.held_elsewhere_bytes,
            "kept_bytes": dict(self.kept),
            **vars(self.engine.counters),
        }

    # --- autograd's side ---

    def _pack(self, record: ActivationSet, tensor: torch.Tensor) -> Any:
        reason = self._why_kept(tensor)
        if reason is not None:
            nbytes = tensor.numel() * tensor.element_size()
            record.kept[reason] += nbytes
            self.kept[reason] += nbytes
            return Kept(tensor)
        storage = tensor.untyped_storage()
        # By identity, not address: memory freed inside the pass may come back as another storage.
        ref = record.by_storage.get(storage._cdata)
        block = ref() if ref is not None else None
        if block is None:
            block = Block(record, storage)
            record.by_storage[storage._cdata] = weakref.ref(block)
            record.blocks.append(weakref.ref(block))
        block.views.append(View(tensor))
        return block, len(block.views) - 1

    def _unpack(self, handle: Any) -> torch.Tensor:
        if isinstance(handle, Kept):
            tensor = handle.tensor
            if handle.version is not None and tensor._version != handle.version:
                raise written(None, tensor, handle.version, handle.origin)
            return tensor
        block, number = handle
        record: ActivationSet = block.owner
        if record.state in (State.COMING, State.BACK) and not record.stays:
            assert record.ticket is not None
            self.engine.use(record.ticket)
            record.state = State.BACK
            # From here on each block lives as long as autograd, or W, needs it.
            record.moving = []
        if block.memory is None:
            raise RuntimeError(
                f"backward needs activation set {record.key}, which is {record.where()}: the "
                "schedule has no RELOAD for it before this pass"
            )
        result: torch.Tensor = block.view(number)
        return result

    def _why_kept(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor stays on the device, or None if it may leave."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return "parameter"
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return "special tensor"
        if tensor.device.type != self.engine.device.torch_device.type:
            return "other device"
        if any(getattr(tensor, mark, False) for mark in MARKS):
            return "marked"
        if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return "special tensor"
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.nbytes() < self._min_bytes:
            return "small"
        if storage._cdata in self._residents():
            return "parameter"
        shared = self._shared.get(storage._cdata)
        if shared is not None and not shared.expired():
            return "held elsewhere"
        if self._keep is not None and self._keep(tensor):
            return "kept on request"
        return None

    # --- the rest ---

    def _residents(self) -> dict[int, dict[tuple[Any, ...], torch.Tensor]]:
        if self._resident is None:
            self._resident = {}
            for tensor in self._resident_tensors():
                if tensor.layout is torch.strided:
                    here = self._resident.setdefault(tensor.untyped_storage()._cdata, {})
                    here[place(tensor)] = tensor
        return self._resident

    def _can_move(self, block: Block) -> bool:
        assert block.memory is not None
        # Somebody emptied the storage, to fill it again before backward: output-discarding
        # recompute. There is nothing to copy, and what fills it must find it.
        if block.memory.untyped_storage().nbytes() < block.range_bytes()[1]:
            return False
        return block.coverage() >= self._min_coverage

    def _get(self, key: Hashable, action: str, wanted: State) -> ActivationSet:
        self._poll()
        record = self._sets.get(key)
        if record is None or record.state is not wanted:
            now = "there is none" if record is None else f"it is {record.where()}"
            raise RuntimeError(f"cannot {action} activation set {key}: {now}")
        return record

    def _drop(self, record: ActivationSet) -> None:
        """Drop the device's copy of what was moved."""
        for block in record.moving:
            for view in block.views:
                view.check(record.key)
        for block in record.moving:
            memory = block.memory
            assert memory is not None
            storage = memory.untyped_storage()
            record.gone.append((StorageWeakRef(storage), storage.nbytes()))
            for view in block.views:
                view.tensor = None
            block.memory = None
            del storage
            self.engine.device.discard(memory)
            del memory
        record.moving = []
        record.late = False

    def _poll(self) -> None:
        """Drop what was late and has been copied by now."""
        for record in self._sets.values():
            ticket = record.ticket if record.late else None
            if ticket is not None and self.engine.release(ticket, patient=True):
                self._drop(record)

    def _device_bytes(self, record: ActivationSet) -> int:
        blocks = [b.memory for b in record.alive() if b.memory is not None]
        blocks += record.buffers
        return sum(memory.untyped_storage().nbytes() for memory in blocks)

    def _count(self, changed: ActivationSet) -> None:
        # Each action looks at one set only: summing over all their blocks would take milliseconds.
        changed.device_bytes = self._device_bytes(changed)
        now = sum(record.device_bytes for record in self._sets.values())
        self.peak_device_bytes = max(self.peak_device_bytes, now)
        self.peak_device_sets = max(self.peak_device_sets, self.device_sets())
        self.peak_host_sets = max(self.peak_host_sets, self.host_sets())
