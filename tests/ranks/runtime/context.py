"""Where a case runs, and what the cases share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import MessageOptions, connected
from tests.ranks.runtime import toy
from tests.support.nccl import NcclEdges

CPU = torch.device("cpu")


@dataclass
class Context:
    """Where a case runs."""

    group: dist.ProcessGroup
    rank: int  # in the group
    size: int
    folder: Path
    memo: dict[str, Any] = field(default_factory=dict)  # lives as long as the process


def channel(
    context: Context,
    dtype: torch.dtype = torch.float32,
    way: str = "edge",
    nccl: bool = False,
    varying: bool = False,
) -> Channel:
    """For toy stages' messages, connected between all ranks of the group.

    Args:
        way: as ``--pp-p2p``; ``edge,buffers``: as under CUDA graphs.
        nccl: by the rules of NCCL.
        varying: shapes are sent ahead.
    """
    options = MessageOptions(own="edge" in way, buffers="buffers" in way)
    every = [(a, b) for a in range(context.size) for b in range(context.size) if a != b]
    if nccl:
        key = f"edges of {context.size} ranks {way}"
        if key not in context.memo:
            context.memo[key] = NcclEdges(context.group, key, CPU, options)
        edges = context.memo[key]
        edges.connect(every, varying)
    else:
        edges = connected(context.group, "passes", every, CPU, options, varying)
    return Channel(edges, None if varying else toy.SHAPE, dtype, CPU)


def raised(call: Any) -> str:
    """Type and text of what ``call`` raises, or ``nothing``."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
