"""Context and sequence parallelism for Megatron's local layers, which support neither.

Stock has both in Transformer Engine's layers alone, which need a GPU. What is here computes the
same numbers plainly (every rank gathers all keys and values), so that schedules can be tested with
these features on CPU ranks.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


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


def _causal_mask(length: int, group: Any, device: torch.device) -> torch.Tensor:
    """True where this rank's ``length`` queries must not look: (1, 1, length, whole sequence)."""
    half, size = length // 2, group.size()
    mine = _chunk_order(size)[2 * group.rank() : 2 * group.rank() + 2]
    queries = torch.cat([torch.arange(half, device=device) + chunk * half for chunk in mine])
    keys = torch.arange(length * size, device=device)
    return (keys[None, :] > queries[:, None])[None, None]


def fix_attention(module: ModuleType) -> None:
    """Let ``DotProductAttention`` of Megatron's module work on a part of the sequence."""
    if hasattr(module, "AttentionFuncionWithContextParallel"):
        return  # Before core_v0.16.1 it could, with --cp-comm-type all_gather.
    cls = module.DotProductAttention
    init, forward = cls.__init__, cls.forward

    @functools.wraps(init)
    def init_with_parts(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1  # what it asserts
        init(self, whole, *args, **kwargs)
        self.config = config

    @functools.wraps(forward)
    def forward_with_parts(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.config.context_parallel_size == 1:
            return forward(self, query, key, value, attention_mask, *args, **kwargs)
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        mask = _causal_mask(query.shape[0], group, query.device)
        whole = [_whole(part, group) for part in (key, value)]
        return forward(self, query, *whole, mask, *args, **kwargs)

    cls.__init__, cls.forward = init_with_parts, forward_with_parts


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
