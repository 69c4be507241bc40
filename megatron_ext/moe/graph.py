"""The experts' own autograd graph inside a chunk, the sum of its gradients, and what it keeps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..offload.blocks import Block, Kept, View
from ..runtime.draws import Draws
from ..runtime.weight_hooks import foreign_hooks, without_tensor_hooks

# (fc1, fc2) of the experts, or of each of them.
Linears = Sequence[tuple[torch.nn.Module, torch.nn.Module]]


class _Box:
    """Where the two ends of a graph meet the outside."""

    def __init__(self) -> None:
        self.dy: torch.Tensor | None = None
        self.gradients: tuple[torch.Tensor | None, ...] = (None, None)


class _Head(torch.autograd.Function):
    """Gives rows and probabilities a history, and puts their gradients into the box.

    As leaves they would be held, with their memory, as long as the graph is.
    """

    @staticmethod
    def forward(ctx: Any, box: _Box, anchor: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.box, ctx.like = box, anchor.detach()
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.box.gradients = gradients
        return None, ctx.like, None, None


class _Tail(torch.autograd.Function):
    """A number in place of the experts' output, whose memory may go; its gradient is in the box."""

    @staticmethod
    def forward(ctx: Any, box: _Box, y: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        dy, ctx.box.dy = ctx.box.dy, None
        return None, dy


class Graph:
    """What autograd recorded of one chunk's experts; holds neither their input nor their output.

    Args:
        rows, probs: the experts' input.

    Attributes:
        inputs: the same with a history; give them to the experts and forget them.
    """

    def __init__(self, rows: torch.Tensor, probs: torch.Tensor) -> None:
        self._box = _Box()
        # On the device, so that the whole pass runs on its stream.
        self._anchor = rows.new_zeros(()).requires_grad_()
        self.inputs: Any = _Head.apply(self._box, self._anchor, rows, probs)
        self._tail: torch.Tensor | None = None

    def end(self, y: torch.Tensor) -> torch.Tensor:
        """``y``, the experts' output, without its history, which is kept here."""
        self.inputs = None
        self._tail = _Tail.apply(self._box, y)
        return y.detach()

    def run(self, dy: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> Any:
        """The backward pass, once. No hook of a parameter fires and no ``.grad`` changes.

        Args:
            dy: gradient of the output.
            parameters: that require gradients.

        Returns:
            (gradient of the rows, of the probabilities, those of the parameters); each may be None.
        """
        assert self._tail is not None
        tail, self._tail, self._box.dy = self._tail, None, dy
        with without_tensor_hooks(parameters):
            _, *found = torch.autograd.grad(tail, [self._anchor, *parameters], allow_unused=True)
        (dx, dp), self._box.gradients = self._box.gradients, (None, None)
        return dx, dp, found


class _Unmade(torch.autograd.Function):
    """Stands for fc2: an output of its shape, not computed, with a history as fc2's has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise AssertionError("never differentiated")


class Recomputation:
    """What autograd saved inside one chunk's experts, dropped in forward and computed again.

    The forward pass leaves its graph behind, whose saved tensors have no memory. To fill it, the
    experts' forward pass runs again, and storages are matched by the order in which autograd saves
    tensors of them, as in PyTorch's own checkpointing. That stops early, at the last saved tensor,
    but products inside functions of Megatron and Transformer Engine save only when they have been
    computed; so here fc1 and fc2 are known. fc2 is left out: its input is all that backward needs.
    Where fc2 saves more (quantized copies, for instance), or what lies behind it, it runs.

    Random number generators are not set back, and no experts of Megatron use any; where others do,
    such as adapters with dropout, ``recording`` raises.

    Args:
        key: of the chunk, for errors.
        residents: identities of the parameters' storages.
        linears: modules inside the experts; without any, everything is computed again.
        whole: otherwise fc1's output is kept, and what is saved before it or by it; where fc1 is
            not known, all is kept.
    """

    def __init__(self, key: Hashable, residents: Set[int], linears: Linears, whole: bool) -> None:
        self._key, self._residents = key, residents
        self._linears, self._whole = linears, whole
        self._autocast: Any = contextlib.nullcontext()  # as in forward
        self._blocks: list[tuple[Block, int]] = []  # with the bytes of each storage
        self._calls: list[Any] = []  # of fc1 and fc2: what they return in place of computing; None
        # While the experts run: storages seen, with their numbers and what keeps them unique.
        self._seen: dict[int, tuple[int | None, Any]] = {}
        self._count = self._next_call = 0
        self._count_behind = -1  # what was counted when fc2 was left out; -1: it was not
        self._keeping = False

    @contextlib.contextmanager
    def recording(self, slot: torch.Tensor) -> Iterator[None]:
        """For the experts' forward pass, in which ``pack`` is called; their input is in ``slot``,
        and others restore it.

        Raises:
            RuntimeError: what is computed again draws random numbers; they would be others then.
        """
        kind = slot.device.type
        dtype, on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = torch.autocast(kind, dtype, on)
        draws = Draws(slot.device)
        with self._running(slot, functools.partial(self._call, draws)):
            yield
            self._look_behind()
        if draws.found():
            raise RuntimeError(
                f"{self._key}: the experts draw random numbers (dropout of an adapter?), which "
                "would be others when they are computed again; use --moe-memory-reuse none, s1 or "
                "s2, or no dropout there"
            )

    def pack(self, tensor: torch.Tensor) -> Any:
        """The handle of a tensor that autograd saves in forward: (block, number) or ``Kept``."""
        number = self._number(tensor, self._drop)
        if number is None:
            return Kept(tensor)
        return without_memory(self._blocks[number][0], tensor)

    def run(self, experts: Callable[[], Any], slot: torch.Tensor) -> None:
        """Compute again what was dropped.

        Args:
            experts: the same forward pass, on the same input.
            slot: where that is now.

        Raises:
            RuntimeError: other tensors were saved than in forward, or one was written in place.
        """
        if not self._blocks:
            return
        filled: list[View] = []

        def fill(tensor: torch.Tensor) -> None:
            if self._number(tensor, self._found) is not None:
                filled.append(View(tensor))

        hooks = torch.autograd.graph.saved_tensors_hooks(fill, _never)
        with self._autocast, torch.enable_grad(), hooks, self._running(slot, self._call_again):
            experts()
        if self._count != len(self._blocks):
            raise self._mismatch(f"{self._count} storages")
        for view in filled:
            view.check(self._key)
        filled.clear()
        # Saved tensors hold the hooks that packed them, and these this object. From here on each
        # storage goes with the last tensor that was saved of it, while backward proceeds.
        self._blocks, self._calls = [], []

    # --- both times ---

    @contextlib.contextmanager
    def _running(self, slot: torch.Tensor, call: Callable[..., Any]) -> Iterator[None]:
        storage = slot.untyped_storage()
        self._seen = {storage._cdata: (None, storage)}
        self._count = self._next_call = 0
        self._keeping = not self._whole
        with contextlib.ExitStack() as stack:
            for fc1, fc2 in self._linears:
                stack.enter_context(_replaced(fc2, functools.partial(call, False)))
                stack.enter_context(_replaced(fc1, functools.partial(call, True)))
            yield
        self._seen.clear()

    def _number(
        self, tensor: torch.Tensor, appear: Callable[[torch.UntypedStorage], Any]
    ) -> int | None:
        """Of the storage of ``tensor``, in the order of appearance; None: it stays."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._residents or not tensor.numel():
            return None
        if storage._cdata not in self._seen:
            number = None if self._keeping else self._count
            self._count += not self._keeping
            held = storage if self._keeping else appear(storage)
            self._seen[storage._cdata] = number, held
        return self._seen[storage._cdata][0]

    # --- forward ---

    def _drop(self, storage: torch.UntypedStorage) -> StorageWeakRef:
        block = Block(self._key, storage)
        block.storage = None
        self._blocks.append((block, storage.nbytes()))
        return StorageWeakRef(storage)

    def _look_behind(self) -> None:
        """What lies behind fc2 has saved tensors, perhaps made from its output: it must run."""
        if 0 <= self._count_behind < self._count:
            self._calls[-1] = None
        self._count_behind = -1

    def _call(
        self, draws: Draws, first: bool, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._look_behind()
        if first and self._whole:
            return original(*args, **kwargs)
        if first:
            self._keeping = True
            with draws.allowed():
                output = original(*args, **kwargs)
            self._keeping = False
            y, *rest = output if isinstance(output, tuple) else (output,)
            kept = y.detach()
            self._seen[kept.untyped_storage()._cdata] = None, kept
            self._calls.append((kept, rest, isinstance(output, tuple)))
            return output
        self._number(args[0], self._drop)
        known = self._count
        output = original(*args, **kwargs)
        y, *rest = output if isinstance(output, tuple) else (output,)
        form = y.shape, y.dtype
        unmade = self._count == known and all(_is_given(one) for one in rest)
        self._calls.append((form, rest, isinstance(output, tuple)) if unmade else None)
        self._count_behind = known if unmade else -1
        return output

    # --- backward ---

    def _found(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        number = self._count - 1
        if number >= len(self._blocks) or storage.nbytes() != self._blocks[number][1]:
            raise self._mismatch(f"one of {storage.nbytes()} bytes as number {number}")
        self._blocks[number][0].storage = storage
        return storage

    def _call_again(
        self, first: bool, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if first and self._whole:
            return original(*args, **kwargs)
        if self._next_call == len(self._calls):
            raise self._mismatch("another call of a linear module")
        call, self._next_call = self._calls[self._next_call], self._next_call + 1
        if not first:
            self._number(args[0], self._found)
        if call is None:
            return original(*args, **kwargs)
        y, rest, several = call
        if first:
            self._keeping = False
            y = y.detach().requires_grad_()
            self._seen[y.untyped_storage()._cdata] = None, y
        else:
            y = _Unmade.apply(args[0], *y)
        return (y, *rest) if several else y

    def _mismatch(self, found: str) -> RuntimeError:
        sizes = [nbytes for _, nbytes in self._blocks]
        return RuntimeError(
            f"{self._key}: computed again, the experts saved {found}, and in forward "
            f"{len(sizes)} storages of {sizes} bytes; they must do the same twice"
        )


def without_memory(block: Block, tensor: torch.Tensor) -> tuple[Block, int]:
    """The handle of a tensor in a block that gets other memory before it is used."""
    number = block.add(tensor)
    block.views[number].tensor = None
    return block, number


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """``call`` gets the calls of ``module``, and its own ``forward`` before their arguments."""
    own = vars(module).get("forward")
    module.forward = functools.partial(call, module.forward)
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _is_given(value: Any) -> bool:
    """True for what a linear module returns beside its output, if no computation made it."""
    if isinstance(value, list | tuple):
        return all(map(_is_given, value))
    return value is None or isinstance(value, torch.nn.Parameter)


def _never(handle: Any) -> torch.Tensor:
    raise AssertionError("no backward pass runs through what is computed again")


class GradientSums:
    """Sums the parameters' gradients over chunks, in fp32 where parameters have less.

    The last chunk's gradient is returned through autograd as any layer's; all others are added to
    ``main_grad``, Megatron's own fp32 sum over microbatches, as Megatron itself would add them. So
    nothing is rounded more often than without chunks, and one chunk is exactly no chunk. Where a
    hook of the user waits for a gradient, all of it is returned.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._held: list[torch.Tensor | None] = [None] * len(parameters)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the next chunk's gradients."""
        for number, (parameter, new) in enumerate(zip(self._parameters, gradients)):
            if new is None:
                continue
            held = self._held[number]
            if held is None or getattr(parameter, "grad_added_to_main_grad", False):
                # In the latter case a kernel has added it already, and this one only stands for it.
                self._held[number] = new
                continue
            main = None if foreign_hooks(parameter) else getattr(parameter, "main_grad", None)
            wide = torch.promote_types(new.dtype, torch.float32)
            if main is not None and torch.promote_types(main.dtype, wide) == main.dtype:
                main.add_(held)
                self._held[number] = new
            else:
                self._held[number] = held.to(wide).add_(new) if held.dtype != wide else held + new

    def result(
        self, without: Callable[[torch.nn.Parameter], bool] = lambda parameter: False
    ) -> list[torch.Tensor | None]:
        """One gradient a parameter, zeros where no chunk had any: autograd, and Megatron's
        reduction with it, has to see every parameter in every call.

        Args:
            without: true for parameters whose gradient, if there is none, comes later.
        """
        return [
            None if held is None and without(parameter) else self._sum(parameter, held)
            for parameter, held in zip(self._parameters, self._held)
        ]

    def _sum(self, parameter: torch.nn.Parameter, held: torch.Tensor | None) -> torch.Tensor:
        if held is not None:
            return held.to(parameter.dtype)
        # Not zeros_like: a parameter may be kept in FP8, its gradient is not.
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
