"""What goes from slice to slice of a microbatch: keys and values, and their gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ....schedule.spec import Cut
from ....schedule.units import Unit
from ...hooks import Hook, around
from ...targets import GPT_FORWARD, Target

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Held:
    """Keys and values of one attention module for one microbatch, from the first slice on.

    Args:
        keys, values: (tokens of the slice, samples, heads, width).
        tokens: of the microbatch.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        self.tensors = [t.new_empty(tokens, *t.shape[1:]) for t in (keys, values)]
        self.gradients: list[torch.Tensor | None] = [None, None]


class Carry(torch.autograd.Function):
    """A slice's keys and values -> all up to its end; its backward pass leaves the gradients of
    earlier ones for their slices, which come later, and takes what later slices left."""

    @staticmethod
    def forward(ctx: Any, keys: Any, values: Any, held: Held, begin: int, end: int) -> Any:
        ctx.held, ctx.begin, ctx.end = held, begin, end
        for buffer, new in zip(held.tensors, (keys, values)):
            # By ``data``: what earlier slices have saved of the buffer has not changed.
            buffer.data[begin:end].copy_(new)
        return tuple(buffer.data[:end] for buffer in held.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = []
        for place, grad in enumerate(grads):
            sums, own = ctx.held.gradients[place], grad[ctx.begin : ctx.end]
            if sums is not None:
                own = (own.to(sums.dtype) + sums[ctx.begin : ctx.end]).to(grad.dtype)
            if ctx.begin:
                if sums is None:  # the last slice comes first
                    wide = _WIDE.get(grad.dtype, grad.dtype)
                    sums = grad.new_zeros(ctx.held.tensors[place].shape, dtype=wide)
                    ctx.held.gradients[place] = sums
                sums[: ctx.begin] += grad[: ctx.begin]
            found.append(own)
        return (*found, None, None, None)


class Slicing:
    """Which slice runs now, and what is held for it.

    Attributes:
        cut: of all sequences.
        now: (model chunk, unit) of the pass that runs; None outside of training.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.now: tuple[int, Unit] | None = None
        self._held: dict[tuple[int, int, int, int], Held] = {}
        self._calls: dict[int, int] = {}

    @contextlib.contextmanager
    def at(self, chunk: int, unit: Unit) -> Iterator[None]:
        """Around F of a unit, and its B, which may compute parts of F again."""
        self.now, before = (chunk, unit), self.now
        self._calls.clear()
        try:
            yield
        finally:
            self.now = before

    @property
    def span(self) -> tuple[int, int]:
        """First token of the slice, and the first one behind it."""
        assert self.now is not None
        ends, number = self.cut.ends, self.now[1].slice
        return (ends[number - 1] if number else 0), ends[number]

    def attended(self, module: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Keys and values up to the slice's end, for a module that attends."""
        assert self.now is not None
        chunk, unit = self.now
        call = self._calls[id(module)] = self._calls.get(id(module), -1) + 1
        place = chunk, unit.microbatch, id(module), call
        begin, end = self.span
        if place not in self._held:
            self._held[place] = Held(keys, values, self.cut.ends[-1])
        found: tuple[Any, Any] = Carry.apply(keys, values, self._held[place], begin, end)
        return found

    def ended(self, chunk: int, microbatch: int) -> None:
        """After B of a microbatch's first slice."""
        for place in [p for p in self._held if p[:2] == (chunk, microbatch)]:
            del self._held[place]

    def clear(self) -> None:
        """Forget everything, after an exception."""
        self._held.clear()
        self.now = None

    @property
    def attentions(self) -> int:
        """Modules that have attended in the pass that runs."""
        return len(self._calls)

    @property
    def left(self) -> int:
        """Modules times microbatches whose keys are held."""
        return len(self._held)


def hooks(slicing: Slicing, implementation: str) -> Sequence[Hook]:
    """Where Megatron's layers see whole sequences."""
    rotary = "megatron.core.models.common.embeddings"
    local = (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        _local,
    )
    engine = (
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
        _transformer_engine,
    )
    target, masked = local if implementation == "local" else engine
    attention = Hook(
        Target.at(target, "self", "query", "key", "value", "attention_mask", "attn_mask_type"),
        functools.partial(_attention, slicing, masked),
        "a slice would attend to itself only",
    )
    return (
        attention,
        *(
            Hook(
                Target.at(f"{rotary}.{module}:{name}.forward", "self", "max_seq_len", "offset"),
                functools.partial(_rotary, slicing),
                "positions of every slice would begin at 0",
            )
            for module, name in (
                ("rotary_pos_embedding", "RotaryEmbedding"),
                ("yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
            )
        ),
        Hook(
            GPT_FORWARD,
            around(functools.partial(_model, slicing)),
            "whole sequences would run in place of slices",
        ),
    )


def _attention(
    slicing: Slicing, masked: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Core attention of a slice to all before it: ``masked`` gives its mask and kind of mask."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if slicing.now is None:
            return original(
                self, query, key, value, attention_mask, attn_mask_type, *args, **kwargs
            )
        key, value = slicing.attended(self, key, value)
        with masked(slicing.span, self, key.device, attention_mask, attn_mask_type) as (mask, kind):
            return original(self, query, key, value, mask, kind, *args, **kwargs)

    return forward


@contextlib.contextmanager
def _local(
    span: tuple[int, int], module: Any, device: Any, mask: Any, kind: Any
) -> Iterator[tuple[Any, Any]]:
    from megatron.core.transformer.enums import AttnMaskType

    begin, end = span
    if mask is None:
        mask = torch.ones(end - begin, end, dtype=torch.bool, device=device)
        mask = mask.triu(begin + 1)[None, None]
    else:
        mask = mask[..., begin:end, :end]
    softmax = module.scale_mask_softmax
    # Its causal kernel takes as many keys as queries; this kind takes the mask.
    before, softmax.attn_mask_type = softmax.attn_mask_type, AttnMaskType.padding
    try:
        yield mask, kind
    finally:
        softmax.attn_mask_type = before


@contextlib.contextmanager
def _transformer_engine(*_: Any) -> Iterator[tuple[Any, Any]]:
    from megatron.core.transformer.enums import AttnMaskType

    yield None, AttnMaskType.causal_bottom_right


def _rotary(slicing: Slicing, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, max_seq_len: int, offset: int = 0, *args: Any, **kwargs: Any) -> Any:
        begin = 0 if slicing.now is None else slicing.span[0]
        return original(self, max_seq_len, offset + begin, *args, **kwargs)

    return forward


def _model(
    slicing: Slicing, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Whole microbatch in, the slice through, losses of the whole out: zero but in the slice."""
    if slicing.now is None:
        return original(model, *args, **kwargs)
    bound = _signature(original).bind(model, *args, **kwargs)
    given, (begin, end) = bound.arguments, slicing.span
    for name in ("input_ids", "position_ids", "labels", "loss_mask"):
        if given.get(name) is not None:
            given[name] = given[name][..., begin:end]
    output = original(*bound.args, **bound.kwargs)
    if model.post_process and given.get("labels") is not None:
        output = torch.nn.functional.pad(output, (begin, slicing.cut.ends[-1] - end))
    return output


@functools.lru_cache(maxsize=4)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
