"""What Megatron's local attention and norm lack beside Transformer Engine's, which need a GPU.

Context and sequence parallelism, packed sequences (``thd``), and the head sizes of multi-latent
attention. What is here computes the same numbers plainly (every rank gathers all keys and values,
documents are told apart by a mask), so that schedules can be tested with these on CPU ranks.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .rebinding import around


class _Gather(torch.autograd.Function):
    """All ranks' parts of a sequence; the gradient of each part is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def _chunk_order(size: int) -> list[int]:
    """Which of the 2 * size chunks of a sequence the ranks hold, one rank after the other.

    Rank r holds chunks r and 2 * size - 1 - r, so that causal attention costs all ranks the same.
    """
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def _whole(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The sequence (first dimension) in order, from this rank's two chunks of it."""
    size = group.size()
    chunks = _Gather.apply(part, group).reshape(2 * size, part.shape[0] // 2, *part.shape[1:])
    order = _chunk_order(size)
    in_order = [chunks[order.index(chunk)] for chunk in range(2 * size)]
    return torch.cat(in_order)


def _mask_of_documents(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """True where a query must not look: into other documents, or behind itself in its own.

    Args:
        queries: (documents + 1,) where the queries of each document begin, and the last's end.
        keys: the same of keys; a document may have more of them before its first query.
    """
    places = [torch.arange(int(edges[-1])) for edges in (queries, keys)]
    of = [
        torch.searchsorted(edges.to(at), at, right=True) - 1
        for edges, at in zip((queries, keys), places)
    ]
    # From the end of its document, which is that of both.
    back = [(edges[1:].to(at)[o] - at) for edges, at, o in zip((queries, keys), places, of)]
    hidden = (of[0][:, None] != of[1]) | (back[1] < back[0][:, None])
    return hidden[None, None]


def _mask(length: int, group: Any, documents: torch.Tensor | None) -> torch.Tensor:
    """True where this rank's ``length`` queries must not look: (1, 1, length, whole sequence).

    Args:
        length: of this rank's part of the sequence.
        group: of the ranks that share the sequence.
        documents: where each document of a packed sequence starts, and where the last ends; None:
            it is one document.
    """
    half, size = length // 2, group.size()
    keys = torch.arange(length * size)
    queries = keys
    if size > 1:
        mine = _chunk_order(size)[2 * group.rank() : 2 * group.rank() + 2]
        queries = torch.cat([torch.arange(half) + chunk * half for chunk in mine])
    hidden = keys[None, :] > queries[:, None]
    if documents is not None:
        of = torch.searchsorted(documents.to(keys), keys, right=True)
        hidden = hidden | (of[None, :] != of[queries][:, None])
    return hidden[None, None]


def fix_attention(module: ModuleType) -> None:
    """Let ``DotProductAttention`` of Megatron's module work on a part of the sequence, on packed
    sequences, and with values of another size than keys."""

    def init_completed(
        original: Any,
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Multi-latent attention passes the channels; here they come with keys and values.
        whole = copy.copy(config)
        whole.context_parallel_size = 1  # what it asserts
        original(self, whole, *args, **kwargs)
        self.config = config

    def forward_completed(
        original: Any,
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        self.hidden_size_per_partition = value.shape[-1] * self.num_attention_heads_per_partition
        parts, packed = self.config.context_parallel_size, packed_seq_params
        if parts == 1 and packed is None:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        if self.scale_mask_softmax.window_size is not None:
            raise NotImplementedError(
                "a sliding window with context parallelism or packed sequences needs Transformer "
                "Engine's attention; the CPU device has none"
            )
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        documents = None
        if packed is not None:  # (tokens, heads, channels): documents one after the other
            documents = packed.cu_seqlens_q
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if packed is not None and parts == 1:
            mask = _mask_of_documents(packed.cu_seqlens_q, packed.cu_seqlens_kv)
        else:
            mask = _mask(query.shape[0], group, documents)
        if parts > 1:
            key, value = (_whole(part, group) for part in (key, value))
        context = original(self, query, key, value, mask, *args, **kwargs)
        return context if packed is None else context.squeeze(1)

    around(module.DotProductAttention, "__init__", init_completed)
    around(module.DotProductAttention, "forward", forward_completed)


def fix_norm(module: ModuleType) -> None:
    """Let ``WrappedTorchNorm`` of Megatron's module work with sequence parallelism.

    The arithmetic is the same; its weights only have to be marked, so that Megatron sums their
    gradients over the ranks that each saw a part of the sequence.
    """
    cls = module.WrappedTorchNorm
    new = cls.__new__

    @functools.wraps(new)
    def new_with_parts(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False  # what it asserts
        norm = new(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    cls.__new__ = staticmethod(new_with_parts)
