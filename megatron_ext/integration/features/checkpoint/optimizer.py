"""Whether a loaded optimizer state is that of the weights it came with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Of a weight's norm. A state of the same weights differs by rounding, one of others by the whole.
_OTHER = 0.5


def main_weights(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shards of 16-bit weights, each with the fp32 main weights of the optimizer.

    Where Megatron's distributed optimizer has both: not with fp8 weights, nor where the main ones
    are in Transformer Engine's optimizer or on the host.
    """
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        weights = getattr(one, "shard_float16_groups", ())
        for group in zip(weights, getattr(one, "shard_fp32_from_float16_groups", ())):
            for weight, main in zip(*group):
                known = weight is not None and main is not None
                if known and weight.numel() == main.numel() and weight.device == main.device:
                    yield weight, main


def is_of_other(weight: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """Whether fp32 main weights are not those of 16-bit ones, but for their rounding; a scalar."""
    own, rounded = weight.float().view(-1), main.to(weight.dtype).float().view(-1)
    # Not what another 16-bit type has rounded to zero.
    least = torch.finfo(weight.dtype).smallest_normal * math.sqrt(weight.numel())
    # A norm that is not finite compares as false: nan may be what has been trained.
    other: torch.Tensor = (rounded - own).norm() > _OTHER * own.norm() + least
    return other


def count_others(optimizer: Any, device: torch.device) -> tuple[int, int]:
    """Of all ranks: shards whose main weights are those of other weights, and all that are known.

    Every rank of the job calls this; the host waits for the device once.
    """
    found = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for weight, main in main_weights(optimizer):
            found[0] += is_of_other(weight, main)
            found[1] += 1
    dist.all_reduce(found)
    others, known = found.tolist()
    return others, known
