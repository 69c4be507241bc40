"""Saved tensors: the storage of each, and its view of that storage."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable

import torch

ALIGNMENT = 512  # as device allocations are; keeps copies on full PCIe transactions
# Of the bytes between the first and the last saved one of a storage, the fraction that is saved; a
# storage with less stays, since a copy would be mostly unused bytes.
MIN_COVERAGE = 0.5


class Form:
    """Shape, strides and dtype of memory, and where it lies in its storage.

    Attributes:
        offset_bytes, end_bytes: of the first and after the last element in the storage.
        touched_bytes: of distinct elements; expanded dimensions repeat theirs.
        dense: memory of ``end_bytes`` from the start of a storage holds it without a gap.
    """

    __slots__ = ("dense", "dtype", "end_bytes", "offset_bytes", "shape", "stride", "touched_bytes")

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int
    ) -> None:
        self.dtype, self.shape, self.stride = dtype, tuple(shape), stride
        last = sum((size - 1) * step for size, step in zip(shape, stride))
        count = 1
        for size, step in zip(shape, stride):
            count *= size if step else 1
        self.offset_bytes = int(offset) * dtype.itemsize
        self.end_bytes = self.offset_bytes + int(last + 1) * dtype.itemsize
        self.touched_bytes = int(count) * dtype.itemsize
        # Strides may overlap in other ways than by expansion; sorted, none of dense memory does.
        self.dense = not offset and self._packed() and self.touched_bytes == self.end_bytes

    def _packed(self) -> bool:
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape)):
            if size == 1:
                continue
            if step != expected:
                return False
            expected *= size
        return True


@functools.lru_cache(maxsize=4096)
def form_of(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int = 0
) -> Form:
    """The form of a tensor: one object for all that are alike, since most steps repeat the last."""
    return Form(shape, stride, dtype, offset)


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of blocks that lie behind each other."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def laid_out(memory: torch.Tensor, forms: Iterable[Form]) -> list[torch.Tensor]:
    """Tensors of these forms in ``memory`` (1-D uint8), behind each other, ``padded``."""
    at, found = 0, []
    for form in forms:
        piece = memory[at : at + form.end_bytes].view(form.dtype)
        found.append(piece.as_strided(form.shape, form.stride))
        at += padded(form.end_bytes)
    return found


def form_of_bytes(nbytes: int) -> Form:
    """The form of 1-D uint8 memory."""
    return form_of((nbytes,), (1,), torch.uint8)


class View:
    """One saved tensor: its form, and until release the tensor itself."""

    __slots__ = ("form", "origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: an output that the graph saves would keep the graph alive. It shares
        # the original's version counter, so later in-place writes can be seen.
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.form = form_of(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())
        node = tensor.grad_fn
        self.origin = "no grad_fn" if node is None else node.name()

    def check(self, key: Hashable) -> None:
        """Raises RuntimeError if the tensor was written in place after it was saved."""
        tensor = self.tensor
        if tensor is not None and tensor._version != self.version:
            raise modified_in_place(key, tensor, self.version, tensor._version, self.origin)


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
        key: of the set, for errors.
        storage: on the device, or what was reloaded of it; None while it is on the host.
        base_bytes: where ``storage`` starts, as an offset in the original storage.
        views: the saved tensors in it.
        single: the form of what is saved, if that is one tensor, or the same one again, without
            gaps: then it is copied as it is.
        stays: it must not be offloaded.
    """

    __slots__ = (
        *("__weakref__", "_bytes", "_version", "_whole", "base_bytes", "key", "single", "stays"),
        *("storage", "views"),
    )

    def __init__(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        self.key = key
        self.storage: torch.UntypedStorage | None = storage
        self.base_bytes = 0
        self.views: list[View] = []
        self.single: Form | None = None
        self.stays = False
        # Once a saved tensor is over memory that was reloaded: that memory, as saved or as bytes,
        # and its version.
        self._whole: torch.Tensor | None = None
        self._bytes: torch.Tensor | None = None
        self._version: int | None = None

    @property
    def memory(self) -> torch.Tensor | None:
        """1-D uint8 over ``storage``."""
        return None if self.storage is None else bytes_of(self.storage)

    @memory.setter
    def memory(self, memory: torch.Tensor | None) -> None:
        self.storage = None if memory is None else memory.untyped_storage()

    def add(self, tensor: torch.Tensor) -> int:
        """A saved tensor over the storage; returns its number."""
        view = View(tensor)
        if not self.views:
            self.single = view.form if view.form.dense else None
        elif view.form is not self.single:
            self.single = None
        self.views.append(view)
        return len(self.views) - 1

    @property
    def form(self) -> Form:
        """Of what is copied."""
        if self.single is not None:
            return self.single
        start, end = self.range_bytes()
        return form_of_bytes(end - start)

    def range_bytes(self) -> tuple[int, int]:
        """[start, end) of what is saved, the start aligned so that kernels see no difference."""
        if self.single is not None:
            return 0, self.single.end_bytes
        start = min(view.form.offset_bytes for view in self.views)
        return start // ALIGNMENT * ALIGNMENT, max(view.form.end_bytes for view in self.views)

    def storage_bytes(self) -> int:
        """Bytes of the storage on the device."""
        assert self.storage is not None
        return self.storage.nbytes()

    def can_move(self) -> bool:
        """True if offloading it frees memory and reloading it restores all saved tensors."""
        if self.stays:
            return False
        start, end = self.range_bytes()
        # Output-discarding recompute empties a storage after F, to fill it again before backward:
        # there is nothing to copy, and what fills it must find it.
        if self.storage_bytes() < end:
            return False
        if self.single is not None:
            return True
        touched = sum(form.touched_bytes for form in {view.form for view in self.views})
        return touched >= MIN_COVERAGE * max(1, end - start)

    def saved(self) -> torch.Tensor:
        """What to copy, in ``form``."""
        if self.single is not None:
            tensor = self.views[0].tensor
        else:
            start, end = self.range_bytes()
            assert self.memory is not None
            tensor = self.memory[start:end]
        assert tensor is not None
        return tensor

    def check(self) -> None:
        """Raises RuntimeError if a saved tensor was written in place after it was saved."""
        for view in self.views:
            view.check(self.key)

    def drop(self) -> torch.Tensor:
        """Let go of the storage on the device; returns a tensor over it."""
        tensor = self.views[0].tensor
        assert tensor is not None
        self.storage = None
        for view in self.views:
            view.tensor = None
        return tensor

    def reloaded(self, buffer: torch.Tensor) -> None:
        """What was copied is, or will be, in ``buffer``, in ``form``."""
        self.storage = buffer.untyped_storage()
        if self.single is not None:
            self._whole = buffer
        else:
            at = int(buffer.storage_offset()) * buffer.itemsize
            self.base_bytes = self.range_bytes()[0] - at

    def view(self, number: int) -> torch.Tensor:
        """The saved tensor over the memory where it is now.

        Raises:
            RuntimeError: it was written in place after it was saved, or after it was reloaded, by
                the backward pass of a function that saved it too.
        """
        saved = self.views[number]
        if saved.tensor is not None:
            saved.check(self.key)
            return saved.tensor
        form, whole = saved.form, self._whole
        if whole is None and self._bytes is None:
            self._bytes = self.memory
        memory = whole if whole is not None else self._bytes
        assert memory is not None
        if self._version is None:
            self._version = memory._version
        elif memory._version != self._version:
            raise modified_in_place(self.key, form, self._version, memory._version, saved.origin)
        if whole is not None:
            return whole
        # A view of one tensor, so that all have its version.
        start, end = (at - self.base_bytes for at in (form.offset_bytes, form.end_bytes))
        return memory[start:end].view(form.dtype).as_strided(form.shape, form.stride)


def release_storage(tensor: torch.Tensor) -> None:
    """Free the memory of a leaf that is needed only for its ``.grad``.

    A stage's input is held by the code that runs B; its values are in the activation set. After
    this it has its shape, dtype and history, and the memory of one number.
    """
    tensor.data = tensor.data.new_zeros(()).expand(tensor.shape)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """1-D uint8 tensor over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def modified_in_place(
    key: Hashable | None, saved: torch.Tensor | Form, version: int, now: int, origin: str
) -> RuntimeError:
    """The error for a ``saved`` tensor that was written in place afterwards."""
    where = "" if key is None else f" in activation set {key}"
    return RuntimeError(
        f"a tensor saved for backward{where} was modified in place afterwards: shape "
        f"{tuple(saved.shape)}, {saved.dtype}, {origin}, version {version} when saved and "
        f"{now} now; its gradient would be wrong; clone it before that operation"
    )
