"""Saved tensors: the storage of each, and its view of that storage."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .arena import ALIGNMENT

# Of the bytes between the first and the last saved one of a storage, the fraction that is saved; a
# storage with less stays, since a copy would be mostly unused bytes.
MIN_COVERAGE = 0.5


class View:
    """One saved tensor: where it lies in its storage, and until release the tensor itself."""

    __slots__ = ("dtype", "offset_bytes", "origin", "shape", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: an output that the graph saves would keep the graph alive. It shares
        # the original's version counter, so later in-place writes can be seen.
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.dtype, self.shape, self.stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        self.origin = "no grad_fn" if tensor.grad_fn is None else tensor.grad_fn.name()

    @property
    def end_bytes(self) -> int:
        """End of the last element in the storage."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        return self.offset_bytes + int(last + 1) * self.dtype.itemsize

    @property
    def touched_bytes(self) -> int:
        """Bytes of distinct elements; expanded dimensions repeat theirs."""
        count = 1
        for size, stride in zip(self.shape, self.stride):
            count *= size if stride else 1
        return int(count) * self.dtype.itemsize

    def check(self, key: Hashable) -> None:
        """Raises RuntimeError if the tensor was written in place after it was saved."""
        if self.tensor is not None and self.tensor._version != self.version:
            raise modified_in_place(key, self.tensor, self.version, self.origin)


class Kept:
    """Handle of a tensor that stays where it is."""

    __slots__ = ("origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Autograd's own tensor could close a cycle, and a stage's input may lose its storage. A
        # parameter does neither, and has attributes.
        own = isinstance(tensor, torch.nn.Parameter) or type(tensor) is not torch.Tensor
        self.tensor = tensor if own and tensor.grad_fn is None else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version
        self.origin = "no grad_fn" if tensor.grad_fn is None else tensor.grad_fn.name()


class Block:
    """One storage of a set.

    Attributes:
        owner: the set; its ``key`` names it in errors.
        memory: 1-D uint8 over the storage on the device, or over what was reloaded of it; None
            while it is on the host.
        base_bytes: where ``memory`` starts, as an offset in the original storage.
        views: the saved tensors in it.
        stays: it must not be offloaded.
    """

    __slots__ = ("__weakref__", "base_bytes", "memory", "owner", "stays", "views")

    def __init__(self, owner: Any, storage: torch.UntypedStorage) -> None:
        self.owner = owner
        self.memory: torch.Tensor | None = bytes_of(storage)
        self.base_bytes = 0
        self.views: list[View] = []
        self.stays = False

    def range_bytes(self) -> tuple[int, int]:
        """[start, end) of what is saved, the start aligned so that kernels see no difference."""
        start = min(view.offset_bytes for view in self.views)
        return start // ALIGNMENT * ALIGNMENT, max(view.end_bytes for view in self.views)

    def storage_bytes(self) -> int:
        """Bytes of the storage on the device."""
        assert self.memory is not None
        return self.memory.untyped_storage().nbytes()

    def can_move(self) -> bool:
        """True if offloading it frees memory and reloading it restores all saved tensors."""
        start, end = self.range_bytes()
        # Output-discarding recompute empties a storage after F, to fill it again before backward:
        # there is nothing to copy, and what fills it must find it.
        if self.stays or self.storage_bytes() < end:
            return False
        distinct = {(v.offset_bytes, v.shape, v.stride, v.dtype): v for v in self.views}
        touched = sum(view.touched_bytes for view in distinct.values())
        return touched >= MIN_COVERAGE * max(1, end - start)

    def saved(self) -> torch.Tensor:
        """The bytes to copy, 1-D uint8."""
        start, end = self.range_bytes()
        assert self.memory is not None
        return self.memory[start:end]

    def check(self, key: Hashable) -> None:
        """Raises RuntimeError if a saved tensor was written in place after it was saved."""
        for view in self.views:
            view.check(key)

    def drop(self) -> torch.Tensor:
        """Let go of the memory on the device, and return it."""
        memory, self.memory = self.memory, None
        assert memory is not None
        for view in self.views:
            view.tensor = None
        return memory

    def view(self, number: int) -> torch.Tensor:
        """The saved tensor over the memory where it is now."""
        saved, memory = self.views[number], self.memory
        if saved.tensor is not None:
            saved.check(self.owner.key)
            return saved.tensor
        assert memory is not None
        offset = (saved.offset_bytes - self.base_bytes) // saved.dtype.itemsize
        empty = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, saved.shape, saved.stride)


def release_storage(tensor: torch.Tensor) -> None:
    """Free the memory of a leaf that is needed only for its ``.grad``.

    A stage's input is held by whoever runs B; its values are in the activation set. After this it
    has its shape, dtype and history, and the memory of one number.
    """
    tensor.data = tensor.data.new_zeros(()).expand(tensor.shape)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """1-D uint8 tensor over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells two tensors over one storage apart."""
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def modified_in_place(
    key: Hashable | None, tensor: torch.Tensor, version: int, origin: str
) -> RuntimeError:
    """The error for a saved tensor that was written in place afterwards."""
    where = "" if key is None else f" in activation set {key}"
    return RuntimeError(
        f"a tensor saved for backward{where} was modified in place afterwards: shape "
        f"{tuple(tensor.shape)}, {tensor.dtype}, {origin}, version {version} when saved and "
        f"{tensor._version} now; its gradient would be wrong; clone it before that operation"
    )
