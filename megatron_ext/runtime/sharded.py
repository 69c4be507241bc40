"""Tensors of which a rank keeps its part until W, and gathers the rest then.

With tensor and sequence parallelism a linear layer multiplies tensors that its ranks gather along
the first dimension: inputs of column-parallel layers, output gradients of row-parallel ones.
Between B and W the part of this rank is enough, as between F and B ("Reducing Activation
Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.2). Gathering copies, so
W computes with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_SOURCE = "_megatron_ext_shard"  # attribute of a gathered tensor


class Sharded:
    """One tensor, gathered when it is needed.

    Args:
        shard: the part of this rank along the first dimension.
        group: the ranks with the other parts, all of the same shape.
    """

    def __init__(self, shard: torch.Tensor, group: Any) -> None:
        self.shard, self.group = shard, group
        self._gathering: tuple[Any, torch.Tensor] | None = None

    @classmethod
    def of(cls, total: torch.Tensor, group: Any) -> Sharded:
        """This rank's part of a gathered tensor, in memory of its own."""
        part: torch.Tensor = total.detach().chunk(group.size())[group.rank()]
        return cls(part.clone(memory_format=torch.contiguous_format), group)

    def start(self) -> None:
        """Begin to gather, beside whatever is computed next; once."""
        if self._gathering is None:
            shard = self.shard
            shape = (shard.shape[0] * self.group.size(), *shard.shape[1:])
            total = torch.empty(shape, dtype=shard.dtype, device=shard.device)
            work = dist.all_gather_into_tensor(
                total, shard.contiguous(), group=self.group, async_op=True
            )
            self._gathering = work, total

    def take(self) -> torch.Tensor:
        """The whole tensor; neither it nor the part is kept."""
        self.start()
        assert self._gathering is not None
        work, total = self._gathering
        work.wait()
        del self._gathering, self.shard
        return total


def whole(tensor: torch.Tensor | Sharded) -> torch.Tensor:
    """``tensor``, gathered if it is in parts."""
    return tensor.take() if isinstance(tensor, Sharded) else tensor


def mark_gathered(total: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
    """Note that ``total`` was gathered from ``shard``, until somebody writes into it."""
    setattr(total, _SOURCE, (shard, group, total._version))


def sharded(tensor: torch.Tensor) -> torch.Tensor | Sharded:
    """What ``tensor`` was gathered from, if that is known; else ``tensor``."""
    shard, group, version = getattr(tensor, _SOURCE, (None, None, None))
    if shard is None or version != tensor._version:
        return tensor
    shard = shard.detach()
    if shard.untyped_storage().nbytes() > shard.nbytes:
        shard = shard.clone(memory_format=torch.contiguous_format)  # not all of a larger tensor
    return Sharded(shard, group)
