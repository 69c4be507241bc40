"""Saved-tensor hooks of a forward pass: which tensors may be offloaded, and their handles.

Autograd holds *handles* of memory *blocks* (one per storage), and a block's memory lives as long as
its handles do. So each tensor is freed inside backward as soon as stock would free it, and what W
passes keep of B's tensors stays valid until W, without the store knowing about W.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .blocks import Block, Kept, modified_in_place
from .engine import Engine
from .sets import ActivationSet, State

# A copy has a fixed cost, and norms' statistics are not worth it.
MIN_BYTES = 64 * 1024
# Transformer Engine (2.x; 1.x for weights) and megatron-core mark tensors that must not move.
MARKS = ("_TE_do_not_offload", "_do_not_offload", "weight_offloading")


def smallest(default: int = MIN_BYTES) -> int:
    """Bytes of the smallest tensor that may move, which the environment can change."""
    return int(os.environ.get("MEGATRON_EXT_OFFLOAD_MIN_BYTES", default))


class Selection:
    """Decides which saved tensors may leave the device.

    Args:
        device_type: of tensors that may.
        resident: tensors that outlive a set (parameters, buffers); they, and views of their
            storages, stay. Asked at the start of every step.
        min_bytes: storages smaller than this stay.
        keep: the offload policy; a tensor for which it is True stays, with its whole storage, and
            counts as device memory of its set.
    """

    def __init__(
        self,
        device_type: str,
        resident: Callable[[], Iterable[torch.Tensor]] = tuple,
        min_bytes: int = MIN_BYTES,
        keep: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self._device_type, self._min_bytes = device_type, min_bytes
        self._resident_tensors, self.keep = resident, keep
        self._residents: frozenset[int] | None = None  # storages of this step's resident tensors
        # Storages that outlived their RELEASE: somebody shares them, so moving them frees nothing.
        self._shared: dict[int, StorageWeakRef] = {}

    def why_not(self, tensor: torch.Tensor) -> str | None:
        """Why ``tensor`` is saved by reference; None if it may leave, the policy aside."""
        # Asked for every saved tensor: ``isinstance`` with Parameter takes half a microsecond.
        if type(tensor) is not torch.Tensor:
            return "parameter" if isinstance(tensor, torch.nn.Parameter) else "special tensor"
        if (base := tensor._base) is not None and isinstance(base, torch.nn.Parameter):
            return "parameter"
        if tensor.layout is not torch.strided:
            return "special tensor"
        if tensor.device.type != self._device_type:
            return "other device"
        for mark in MARKS:
            if getattr(tensor, mark, False):
                return "marked"
        if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return "special tensor"
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.nbytes() < self._min_bytes:
            return "small"
        if self._residents is None:
            strided = (t for t in self._resident_tensors() if t.layout is torch.strided)
            self._residents = frozenset(t.untyped_storage()._cdata for t in strided)
        if storage._cdata in self._residents:
            return "parameter"
        shared = self._shared.get(storage._cdata) if self._shared else None
        return "held elsewhere" if shared is not None and not shared.expired() else None

    def add_shared(self, storage: StorageWeakRef) -> None:
        """Tensors of ``storage`` stay as long as it lives."""
        self._shared[storage.cdata] = storage

    def end_step(self) -> None:
        """Forget what may change between steps."""
        self._residents = None
        self._shared = {key: ref for key, ref in self._shared.items() if not ref.expired()}


class SavedTensors:
    """Saved-tensor hooks for the forward pass of one set.

    Args:
        record: the set.
        selection: of tensors that may leave.
        engine: of the set's transfers.
        kept_bytes: counts what is saved by reference or stays by policy.
    """

    def __init__(
        self, record: ActivationSet, selection: Selection, engine: Engine, kept_bytes: Counter[str]
    ) -> None:
        self._record, self._selection, self._engine = record, selection, engine
        self._kept_bytes, self._current_stream = kept_bytes, engine.device.stream
        self._stream = self._current_stream()
        # By identity, not address: memory freed inside the pass may come back as another storage.
        self._by_storage: dict[int, weakref.ref[Block]] = {}

    def hooks(self) -> Any:
        """A context in which autograd saves tensors for the set."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        reason = self._selection.why_not(tensor)
        if reason is not None:
            self._kept_bytes[reason] += tensor.numel() * tensor.element_size()
            return Kept(tensor)
        if self._current_stream() != self._stream:
            self._record.several_streams = True
        storage = tensor.untyped_storage()
        ref = self._by_storage.get(storage._cdata)
        block = ref() if ref is not None else None
        if block is None:
            block = Block(self._record, storage)
            self._by_storage[storage._cdata] = weakref.ref(block)
            self._record.blocks.append(weakref.ref(block))
        if self._selection.keep is not None and self._selection.keep(tensor):
            self._kept_bytes["policy"] += tensor.numel() * tensor.element_size()
            # All of the storage: what another module saves of it cannot free it alone.
            block.stays = True
        return block, block.add(tensor)

    def _unpack(self, handle: Any) -> torch.Tensor:
        if isinstance(handle, Kept):
            tensor = handle.tensor
            if handle.version is not None and tensor._version != handle.version:
                raise modified_in_place(None, tensor, handle.version, handle.origin)
            return tensor
        block, number = handle
        record = self._record
        if record.state in (State.RELOADING, State.RELOADED) and not record.stays:
            assert record.ticket is not None
            record.state = State.RELOADED
            # What stayed is not ours to record.
            reloaded = block.storage if block.views[number].tensor is None else None
            if self._engine.use(record.ticket, reloaded):
                # From here on each block lives as long as autograd, or W, needs it.
                record.in_copy = []
        if block.storage is None:
            raise RuntimeError(
                f"backward needs activation set {record.key}, which is {record.where()}: the "
                "schedule has no RELOAD for it before this pass"
            )
        result: torch.Tensor = block.view(number)
        return result
