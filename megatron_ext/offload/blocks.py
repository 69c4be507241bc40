"""Saved tensors: which memory each lies in, and how to see it there again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .arena import ALIGNMENT


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
            raise written(key, self.tensor, self.version, self.origin)


class Kept:
    """Handle of a tensor that stays where it is."""

    __slots__ = ("origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Autograd's own tensor could close a cycle, and a stage's input may be hollowed. A
        # parameter does neither, and has attributes.
        own = isinstance(tensor, torch.nn.Parameter) or type(tensor) is not torch.Tensor
        self.tensor = tensor if own and tensor.grad_fn is None else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version
        self.origin = "no grad_fn" if tensor.grad_fn is None else tensor.grad_fn.name()


class Block:
    """One storage of a set."""

    __slots__ = ("__weakref__", "base_bytes", "memory", "owner", "views")

    def __init__(self, owner: Any, storage: torch.UntypedStorage) -> None:
        self.owner = owner  # the set: its ``key`` names it in errors
        # 1-D uint8 over the memory, wherever it is on the device; None while it is away.
        self.memory: torch.Tensor | None = bytes_of(storage)
        self.base_bytes = 0  # where ``memory`` starts, as an offset in the original storage
        self.views: list[View] = []

    def range_bytes(self) -> tuple[int, int]:
        """[start, end) of what is saved, the start aligned so that kernels see no difference."""
        start = min(view.offset_bytes for view in self.views)
        return start // ALIGNMENT * ALIGNMENT, max(view.end_bytes for view in self.views)

    def coverage(self) -> float:
        """How much of the range the saved tensors use."""
        distinct = {(v.offset_bytes, v.shape, v.stride, v.dtype): v for v in self.views}
        start, end = self.range_bytes()
        return sum(view.touched_bytes for view in distinct.values()) / max(1, end - start)

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


def hollow(tensor: torch.Tensor) -> None:
    """Take the memory away from a leaf that is needed only for its ``.grad``.

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


def written(key: Hashable | None, tensor: torch.Tensor, version: int, origin: str) -> RuntimeError:
    where = "" if key is None else f" in activation set {key}"
    return RuntimeError(
        f"a tensor saved for backward{where} was modified in place afterwards: shape "
        f"{tuple(tensor.shape)}, {tensor.dtype}, {origin}, version {version} when saved and "
        f"{tensor._version} now; its gradient would be wrong; clone it before that operation"
    )
