"""What goes from slice to slice of a microbatch: keys and values, and their gradients."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ....runtime import merged_attention
from ...errors import ConfigError
from ...hooks import hooked
from ...support import CAUSAL, require
from ...targets import ATTENTION, ROTARY
from ...utils import untraced
from . import documents
from .state import Sliced, Slicing

KEYS = "keys"  # what is held of a module that attends
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_CAUSAL = ("causal", "causal_bottom_right", "padding_causal")


class _OfDocuments(enum.Enum):
    """Transformer Engine's masks that Megatron's ``AttnMaskType`` lacks, by their names."""

    padding_causal_bottom_right = enum.auto()


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
    """A slice's keys and values -> all from ``start`` to its end.

    Its backward pass leaves the gradients of earlier ones for their slices, which come later, and
    takes what later slices left.
    """

    @staticmethod
    def forward(
        ctx: Any, keys: Any, values: Any, held: Held, begin: int, end: int, start: int = 0
    ) -> Any:
        ctx.held, ctx.begin, ctx.end, ctx.start = held, begin, end, start
        for buffer, new in zip(held.tensors, (keys, values)):
            # By ``data``: what earlier slices have saved of the buffer has not changed.
            buffer.data[begin:end].copy_(new)
        return tuple(buffer.data[start:end] for buffer in held.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found, prefix = [], ctx.begin - ctx.start
        for place, grad in enumerate(grads):
            sums, own = ctx.held.gradients[place], grad[prefix:]
            if sums is not None:
                own = (own.to(sums.dtype) + sums[ctx.begin : ctx.end]).to(grad.dtype)
            if prefix:
                if sums is None:  # the last slice comes first
                    wide = _WIDE.get(grad.dtype, grad.dtype)
                    sums = grad.new_zeros(ctx.held.tensors[place].shape, dtype=wide)
                    ctx.held.gradients[place] = sums
                sums[ctx.start : ctx.begin] += grad[:prefix]
            found.append(own)
        return (*found, None, None, None, None)


def attended(slicing: Slicing, module: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Keys and values that the slice attends to, and its own, for a module that attends.

    Raises:
        ConfigError: they are not the slice's.
    """
    begin, end = slicing.span
    if len(keys) != end - begin:
        raise ConfigError(
            f"slices need input_ids on all stages where sequences differ in length, but slice "
            f"{slicing.unit} has tokens {begin} to {end} and a layer {len(keys)}; give them there"
        )

    def make() -> Held:
        made = Held(keys, values, slicing.tokens)
        if slicing.stays is not None:
            for tensor in made.tensors:
                slicing.stays(tensor)
        return made

    held = slicing.held(KEYS, module, make)
    found: tuple[Any, Any] = Carry.apply(keys, values, held, begin, end, begin - slicing.prefix)
    return found


def _require_causal(kind: Any) -> None:
    """Raises:
    ConfigError: tokens attend to later ones, by the kind of a layer's mask.
    """
    require(CAUSAL, kind.name in _CAUSAL, found=f"a layer's mask is {kind.name}")


@contextlib.contextmanager
def _local(
    slicing: Slicing, module: Any, device: Any, mask: Any, kind: Any
) -> Iterator[tuple[Any, Any]]:
    from megatron.core.transformer.enums import AttnMaskType

    begin, end = slicing.span
    if slicing.documents:
        yield mask, kind  # by their lengths
        return
    softmax = module.scale_mask_softmax
    before = softmax.attn_mask_type
    if mask is None:
        _require_causal(before)
        mask = torch.ones(end - begin, end, dtype=torch.bool, device=device)
        mask = mask.triu(begin + 1)[None, None]
    else:
        if slicing.first and not slicing.unit.microbatch:  # the host waits for it
            causal = bool(mask[..., begin:end, end:].all())
            require(CAUSAL, causal, found="a mask shows later tokens")
        # The fused kernel takes a pointer, without strides.
        mask = mask[..., begin:end, :end].contiguous()
    # Its causal kernel takes as many keys as queries; this kind takes the mask.
    softmax.attn_mask_type = AttnMaskType.padding
    try:
        yield mask, kind
    finally:
        softmax.attn_mask_type = before


@contextlib.contextmanager
def _transformer_engine(
    slicing: Slicing, module: Any, device: Any, mask: Any, kind: Any
) -> Iterator[tuple[Any, Any]]:
    from megatron.core.transformer.enums import AttnMaskType

    _require_causal(kind)
    if not slicing.documents:
        yield None, AttnMaskType.causal_bottom_right
    else:  # Where no document is cut, what Megatron takes for whole ones.
        yield (
            None,
            _OfDocuments.padding_causal_bottom_right
            if slicing.prefix
            else (AttnMaskType.padding_causal),
        )


_WHY = "a slice would attend to itself only"


class Attention(Sliced):
    """Where Megatron's layers see whole sequences.

    Attributes:
        implementations: of attention that may run, of ``local`` and ``transformer_engine``.
        one_mask: every microbatch is given the same mask, if it is given one.
    """

    implementations: Sequence[str] = ()
    one_mask = False
    _causal = False

    @hooked(ATTENTION["local"], _WHY, when=lambda self: "local" in self.implementations)
    def _local(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._attention(_local, original, *args, **kwargs)

    @hooked(
        ATTENTION["transformer_engine"],
        _WHY,
        when=lambda self: "transformer_engine" in self.implementations,
    )
    def _transformer_engine(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._attention(_transformer_engine, original, *args, **kwargs)

    # In a graph what ``Carry`` writes to its buffer would count as a change of what earlier slices
    # have saved.
    @untraced
    def _attention(
        self,
        masked: Callable[..., Any],
        original: Callable[..., Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Core attention of a slice to all before it: ``masked`` gives its mask and its kind."""
        slicing = self.slicing
        if slicing.now is None:
            given = (module, query, key, value, attention_mask, attn_mask_type)
            return original(*given, *args, **kwargs)
        key, value = attended(slicing, module, key, value)
        packed = kwargs.get("packed_seq_params")
        if packed is not None:
            kwargs["packed_seq_params"] = documents.attended(slicing, packed)
        elif masked is _local and not slicing.documents and self._is_causal(module, attention_mask):
            scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1)
            out = merged_attention.attend(query, key, value, scale, None)
            if out is not None:
                return out
        with masked(slicing, module, key.device, attention_mask, attn_mask_type) as (mask, kind):
            return original(module, query, key, value, mask, kind, *args, **kwargs)

    def _is_causal(self, module: Any, mask: Any) -> bool:
        """Whether Megatron's local attention is causal and nothing else: no dropout, no window, no
        offset of the softmax, no mask that may differ between microbatches."""
        softmax, slicing = module.scale_mask_softmax, self.slicing
        if (
            softmax.attn_mask_type.name != "causal"
            or softmax.window_size is not None
            or module.softmax_offset is not None
            or (module.training and module.attention_dropout.p)
        ):
            return False
        if mask is None:
            return True
        if self.one_mask and slicing.first and not slicing.unit.microbatch:
            begin, end = slicing.span
            later = torch.ones(end - begin, mask.shape[-1], dtype=torch.bool, device=mask.device)
            # The host waits for it, in the first microbatch of a step.
            self._causal = bool((mask[..., begin:end, :] == later.triu(begin + 1)).all())
        return self.one_mask and self._causal

    @hooked(ROTARY, "positions of every slice would begin at 0")
    def _rotary(
        self,
        original: Callable[..., Any],
        module: Any,
        max_seq_len: int,
        offset: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        slicing = self.slicing
        if slicing.now is None or not slicing.documents:
            begin = 0 if slicing.now is None else slicing.span[0]
            return original(module, max_seq_len, offset + begin, *args, **kwargs)
        found = original(module, max_seq_len, offset, *args, **kwargs)
        if not isinstance(found, tuple):
            return documents.positions(slicing, found)
        return documents.positions(slicing, found[0]), *found[1:]  # with YaRN's scale
