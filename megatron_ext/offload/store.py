"""The activation store: moves the activation sets of one rank between device and host.

One *set* is what one model chunk keeps for one microbatch. The schedule moves it::

    F: with store.saving(key)   OFFLOAD   RELEASE   PREPARE   RELOAD   B   W: store.finish(key)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .engine import Engine
from .saved import MIN_BYTES, Selection
from .sets import ActivationSet, Footprint, State
from .statistics import Statistics


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
        self.engine = engine
        self._selection = Selection(engine.device.torch_device.type, resident, min_bytes, keep)
        self.statistics = Statistics(kept_bytes=self._selection.kept_bytes)
        self._sets: dict[Hashable, ActivationSet] = {}
        # By set: storages that RELEASE dropped, with their bytes, until PREPARE.
        self._released: dict[Hashable, list[tuple[StorageWeakRef, int]]] = {}
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
        record = self._sets[key] = ActivationSet(key, self.engine, self._selection)
        self._saving = True
        try:
            with record.hooks():
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
        self._get(key, "offload", State.ON_DEVICE).offload(reserve_bytes)

    def release(self, key: Hashable) -> None:
        """RELEASE: the device's copy is dropped; compute waits if it has not been copied yet.

        Raises:
            RuntimeError: a saved tensor was written in place, or OFFLOAD is missing.
        """
        record = self._get(key, "release", State.OFFLOADING)
        for block in record.in_copy:
            block.check()
        memory = record.let_go()
        if record.stays:
            return
        storages = [tensor.untyped_storage() for tensor in memory]
        self._released[key] = [(StorageWeakRef(each), each.nbytes()) for each in storages]
        del storages
        assert record.ticket is not None
        memory.reverse()
        self.engine.release(record.ticket, memory, record.contents.several_streams)
        self._count(record)

    def prepare(self, key: Hashable) -> None:
        """PREPARE: allocate device memory for the set, on the compute stream.

        Raises:
            RuntimeError: RELEASE is missing.
        """
        record = self._get(key, "prepare", State.ON_HOST)
        for ref, nbytes in self._released.pop(key, ()):
            if not ref.expired():
                self.statistics.held_elsewhere_bytes += nbytes
                self._selection.add_shared(ref)
        record.prepare()
        self._count(record)

    def reload(self, key: Hashable) -> None:
        """RELOAD: start copying the set back.

        Raises:
            RuntimeError: PREPARE is missing.
        """
        self._get(key, "reload", State.PREPARED).reload()

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
        record.finish()
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
        self._released.clear()
        self._selection.end_step()
        try:
            self.engine.synchronize()
        finally:
            for record in records:
                record.finish()

    def stays(self, tensor: torch.Tensor) -> None:
        """What is saved of this tensor's memory stays on the device, as long as that lives."""
        self._selection.add_shared(StorageWeakRef(tensor.untyped_storage()))

    # --- questions ---

    def __len__(self) -> int:
        return len(self._sets)

    def away(self) -> list[Hashable]:
        """Sets that occupy no device memory, from RELEASE to PREPARE."""
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
