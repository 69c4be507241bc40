"""The activation store: moves the activation sets of one rank between device and host.

One *set* is what one model chunk keeps for one microbatch. The schedule moves it::

    F: with store.saving(key)   OFFLOAD   RELEASE   PREPARE   RELOAD   B   W: store.finish(key)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .engine import Engine
from .saved import MIN_BYTES, SavedTensors, Selection
from .sets import NO_ROOM, NOTHING, ActivationSet, Footprint, State
from .statistics import Statistics, device_sets


class ActivationStore:
    """Keeps and moves the activation sets of one rank.

    Args:
        engine: moves them.
        resident, min_bytes, keep: which tensors stay on the device (see ``Selection``).
    """

    def __init__(
        self,
        engine: Engine,
        resident: Callable[[], Iterable[torch.Tensor]] = tuple,
        *,
        min_bytes: int = MIN_BYTES,
        keep: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.engine, self.statistics = engine, Statistics()
        self._selection = Selection(engine.device.torch_device.type, resident, min_bytes, keep)
        self._sets: dict[Hashable, ActivationSet] = {}
        self._saving = False

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
        if self._saving or key in self._sets:
            what = "another set is being saved" if self._saving else "its last pass is not finished"
            raise RuntimeError(f"activation set {key} cannot be saved: {what}")
        record = self._sets[key] = ActivationSet(key)
        saved = SavedTensors(record, self._selection, self.engine, self.statistics.kept_bytes)
        self._saving = True
        try:
            with saved.hooks():
                yield
            record.ticket = self.engine.produced()
        except BaseException:
            del self._sets[key]
            raise
        finally:
            self._saving = False
        self._count(record)

    # --- the schedule's actions ---

    def offload(self, key: Hashable, reserve_bytes: int = 0) -> None:
        """OFFLOAD: start copying the set to the host.

        If a sealed arena has no room, the set stays, which ``report`` counts. ``reserve_bytes``
        as for ``Engine.offload``.

        Raises:
            RuntimeError: a saved tensor was written in place, or the set is not on the device.
            OffloadConfigError: the first step needs more host memory than there is.
        """
        record = self._get(key, "offload", State.ON_DEVICE)
        assert record.ticket is not None
        blocks = record.movable()
        for block in blocks:
            block.check(key)
        saved, forms = [b.saved() for b in blocks], [b.form for b in blocks]
        if not blocks:
            record.stays = NOTHING
        elif not self.engine.offload(record.ticket, saved, reserve_bytes, forms):
            record.stays = NO_ROOM
        else:
            record.in_copy, record.offloaded = blocks, [weakref.ref(block) for block in blocks]
        record.state = State.OFFLOADING

    def release(self, key: Hashable) -> None:
        """RELEASE: the device's copy is dropped; compute waits if it has not been copied yet.

        Raises:
            RuntimeError: a saved tensor was written in place, or OFFLOAD is missing.
        """
        record = self._get(key, "release", State.OFFLOADING)
        record.state = State.ON_HOST
        if record.stays:
            return
        assert record.ticket is not None
        self.engine.release(record.ticket)
        for block in record.in_copy:
            block.check(key)
        for block in record.in_copy:
            memory = block.drop()
            storage = memory.untyped_storage()
            record.released.append((StorageWeakRef(storage), storage.nbytes()))
            del storage
            self.engine.discard(memory, record.several_streams)
            del memory
        record.in_copy = []
        self._count(record)

    def prepare(self, key: Hashable) -> None:
        """PREPARE: allocate device memory for the set, on the compute stream.

        Raises:
            RuntimeError: RELEASE is missing.
        """
        record = self._get(key, "prepare", State.ON_HOST)
        record.state = State.PREPARED
        if not record.stays:
            assert record.ticket is not None
            for ref, nbytes in record.released:
                if not ref.expired():
                    self.statistics.held_elsewhere_bytes += nbytes
                    self._selection.add_shared(ref)
            record.released = []
            record.buffers = self.engine.prepare(record.ticket)
        self._count(record)

    def reload(self, key: Hashable) -> None:
        """RELOAD: start copying the set back.

        Raises:
            RuntimeError: PREPARE is missing.
        """
        record = self._get(key, "reload", State.PREPARED)
        record.state = State.RELOADING
        if record.stays:
            return
        assert record.ticket is not None
        # A graph may have been dropped meanwhile; what it saved is not worth copying.
        blocks = [ref() for ref in record.offloaded]
        buffers = [b if block is not None else None for block, b in zip(blocks, record.buffers)]
        self.engine.reload(record.ticket, buffers)
        for block, buffer in zip(blocks, buffers):
            if block is not None:
                assert buffer is not None
                block.reloaded(buffer)
        record.buffers = []
        # Until compute waits for the copy, nobody may free what it writes to.
        record.in_copy = [block for block in blocks if block is not None]

    def finish(self, key: Hashable) -> None:
        """After the set's last pass, W or BW: forget it.

        Memory that the graph or anybody else still holds stays valid.

        Raises:
            RuntimeError: the set is on the host: RELOAD is missing, so B cannot have run.
        """
        record = self._sets.get(key)
        if record is None:
            raise RuntimeError(f"there is no activation set {key} to finish")
        if record.state in (State.ON_HOST, State.PREPARED) and not record.stays:
            raise RuntimeError(f"activation set {key} cannot be finished: it is {record.where()}")
        if record.ticket is not None:
            self.engine.finish(record.ticket)
        record.in_copy = []
        del self._sets[key]

    def end_step(self) -> None:
        """After the last action of an iteration; after the first one the arena is sealed.

        Raises:
            RuntimeError: a set was never finished.
        """
        if self._sets:
            left = ", ".join(f"{key} ({r.where()})" for key, r in self._sets.items())
            raise RuntimeError(f"an iteration ended with activation sets left over: {left}")
        self.engine.arena.seal()
        self._selection.end_step()

    def clear(self) -> None:
        """After an exception: wait for running copies and forget all sets."""
        records = list(self._sets.values())
        self._sets.clear()
        self._selection.end_step()
        try:
            self.engine.synchronize()
        finally:
            for record in records:
                if record.ticket is not None:
                    self.engine.finish(record.ticket)
                record.in_copy, record.buffers = [], []

    def stays(self, tensor: torch.Tensor) -> None:
        """What is saved of this tensor's memory stays on the device, as long as that lives."""
        self._selection.add_shared(StorageWeakRef(tensor.untyped_storage()))

    # --- questions ---

    def __len__(self) -> int:
        return len(self._sets)

    def device_sets(self) -> int:
        """Sets that occupy device memory: from F to the end of W, except on the host."""
        return device_sets(self._sets.values())

    def away(self) -> list[Hashable]:
        """Sets that occupy none, from RELEASE to PREPARE."""
        return [key for key, record in self._sets.items() if not record.on_device]

    def footprint(self, key: Hashable) -> Footprint:
        """Bytes of a set whose F has just ended; KeyError if there is none."""
        return self._sets[key].footprint()

    def reset_peaks(self) -> None:
        """Restart the peaks from the current sets."""
        self.statistics.reset_peaks(self._sets.values())

    def report(self) -> dict[str, Any]:
        """Numbers for a log or a trace: bytes, sets, and how the transfers went."""
        arena = self.engine.arena
        return {
            **vars(self.statistics),
            "kept_bytes": dict(self.statistics.kept_bytes),
            "arena_bytes": arena.capacity_bytes,
            "arena_peak_bytes": arena.peak_bytes,
            **vars(self.engine.counters),
        }

    def _get(self, key: Hashable, action: str, wanted: State) -> ActivationSet:
        record = self._sets.get(key)
        if record is None or record.state is not wanted:
            now = "there is none" if record is None else f"it is {record.where()}"
            raise RuntimeError(f"cannot {action} activation set {key}: {now}")
        return record

    def _count(self, changed: ActivationSet) -> None:
        changed.measure()
        self.statistics.observe(self._sets.values())
