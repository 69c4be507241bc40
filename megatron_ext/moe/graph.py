"""The experts' own autograd graph inside a chunk, the sum of its gradients, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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
        _, *found = torch.autograd.grad(tail, [self._anchor, *parameters], allow_unused=True)
        (dx, dp), self._box.gradients = self._box.gradients, (None, None)
        return dx, dp, found


class GradientSums:
    """Sums the parameters' gradients over chunks, in fp32 where parameters have less.

    The last chunk's gradient is returned through autograd as any layer's; all others are added to
    ``main_grad``, Megatron's own fp32 sum over microbatches, as Megatron itself would add them. So
    nothing is rounded more often than without chunks, and one chunk is exactly no chunk.
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
            main = getattr(parameter, "main_grad", None)
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


def kept_bytes_per_row(
    experts: Callable[..., torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    local_experts: int,
    like: torch.Tensor,
    probs_dtype: torch.dtype,
) -> float:
    """Bytes that the experts keep for backward per row, besides their input: K of the formula.

    Runs them forward on a few rows of zeros, twice, with other numbers of rows, so that what they
    keep once does not count.

    Args:
        experts: as ``Region`` calls them. parameters: theirs, which do not count.
        local_experts: of this rank.
        like: a tensor of the rows' width, dtype and device.
    """

    def kept(each: int) -> int:
        counts = torch.full((local_experts,), each)
        x = like.new_zeros((each * local_experts, like.shape[-1])).requires_grad_()
        p = torch.zeros(len(x), dtype=probs_dtype, device=x.device).requires_grad_()
        found = {t.untyped_storage()._cdata: 0 for t in (x, p, *parameters)}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage.nbytes())
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = experts(x, counts, p)
        del y
        return sum(found.values())

    # Multiples of what quantized experts pad to: 16 or 32 rows.
    return (kept(64) - kept(32)) / (32 * local_experts)
