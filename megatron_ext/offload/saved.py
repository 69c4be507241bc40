"""Which of the tensors that autograd saves may leave the device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

    Attributes:
        kept_bytes: saved by reference, or kept by the policy, by reason.
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
        self.kept_bytes: Counter[str] = Counter()
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
        if storage._cdata in (self._residents or self.residents()):
            return "parameter"
        shared = self._shared.get(storage._cdata) if self._shared else None
        return "held elsewhere" if shared is not None and not shared.expired() else None

    def residents(self) -> frozenset[int]:
        """Identities of the storages of the resident tensors."""
        if self._residents is None:
            strided = (t for t in self._resident_tensors() if t.layout is torch.strided)
            self._residents = frozenset(t.untyped_storage()._cdata for t in strided)
        return self._residents

    def add_shared(self, storage: StorageWeakRef) -> None:
        """Tensors of ``storage`` stay as long as it lives."""
        self._shared[storage.cdata] = storage

    def end_step(self) -> None:
        """Forget what may change between steps."""
        self._residents = None
        self._shared = {key: ref for key, ref in self._shared.items() if not ref.expired()}
