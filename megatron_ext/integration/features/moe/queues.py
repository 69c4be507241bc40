"""Hardware queues and stream priorities: whether messages run beside the experts on a GPU.

Read from Megatron's and Transformer Engine's sources; nothing here has been timed on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...undo import set_environment

logger = logging.getLogger(__name__)

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"
# Chunks that still gain with one queue: C(i) runs behind S(i+1), which runs behind R(i-1).
QUEUE_CHUNKS = 2
ONE_QUEUE = (
    f"{CONNECTIONS}=1: with one hardware queue a chunk's experts wait for the messages issued "
    "before them, and more than 2 chunks gain nothing (a model of forward where messages take as "
    "long as the experts: 1.33 times as fast with any number of chunks, otherwise 1.60 with 4 and "
    "1.78 with 8); set it to 32, which tensor parallel overlap may pay for"
)
_NOT_DEMANDED = (
    f"with tensor or context parallelism before Blackwell Megatron demands {CONNECTIONS}=1, for "
    f"overlaps that rely on the order of launches; MoE layers in chunks run with %s here; set it "
    "to 1 where those overlaps matter more"
)


def one_queue() -> bool:
    """True if everything on the device waits for what was launched before it."""
    return os.environ.get(CONNECTIONS) == "1"


def set_default() -> None:
    """Ask for all hardware queues, unless the user has said how many or the driver knows."""
    if not torch.cuda.is_initialized():
        set_environment(CONNECTIONS, _MOST)


@contextlib.contextmanager
def without_demand(rank: int) -> Iterator[None]:
    """Inside, Megatron's validation does not insist on one queue; a warning takes its place.

    The process's environment stays as it is: the driver may read it meanwhile.
    """
    asked, module = [], sys.modules["megatron.training.arguments"]

    def get(name: str, default: str | None = None) -> str | None:
        if name == CONNECTIONS:
            asked.append(name)
            return "1"
        return os.environ.get(name, default)

    stand_in: Any = types.ModuleType("os")
    vars(stand_in).update(vars(os))
    stand_in.environ = copy.copy(os.environ)
    stand_in.environ.get = get
    holder: Any = module
    holder.os = stand_in
    try:
        yield
    finally:
        holder.os = os
    if asked and rank == 0:
        logger.warning(_NOT_DEMANDED, os.environ.get(CONNECTIONS, "8 (unset)"))


def nccl() -> bool:
    """True if process groups are NCCL's."""
    return dist.is_nccl_available() and dist.get_backend() != "gloo"
