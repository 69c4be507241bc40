"""Measurements that all ranks make together: pass times, message latency, host transfer rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..offload.arena import HostArena
from ..offload.device import Device
from ..offload.rates import Rates, measure_rates
from ..runtime.channel import Channel
from ..schedule.actions import Op
from ..schedule.placement import Placement
from ..schedule.units import Unit
from .callbacks import Duration

# Seconds of F, B and W, by model chunk of this rank and operation.
Seconds = Mapping[tuple[int, Op], float]

# Bytes each way of one measurement: long enough to hide the cost of starting a copy.
PROBE_BYTES = {"cuda": 128 << 20, "cpu": 2 << 20}


def pass_seconds(
    durations: Sequence[Duration], of: Callable[[Sequence[float]], float] = statistics.median
) -> dict[tuple[int, Op], float]:
    """What F, B and W of each chunk take.

    The first microbatch of a step does not count if there are others: its passes also load kernels.
    A BW counts half to each. Slices of a microbatch add up.

    Args:
        durations: (chunk, operation, microbatch, seconds).
        of: the number that stands for a pass's times.
    """
    every: dict[tuple[int, Op, int], list[float]] = {}
    last = max((place_of(unit)[0] for _, _, unit, _ in durations), default=0)
    for chunk, op, unit, seconds in durations:
        microbatch, number = place_of(unit)
        if microbatch == 0 and last > 0:
            continue
        for part in (Op.B, Op.W) if op is Op.BW else (op,):
            times = every.setdefault((chunk, part, number), [])
            times.append(seconds / (2 if op is Op.BW else 1))
    found: dict[tuple[int, Op], float] = {}
    for (chunk, part, _), times in every.items():
        found[chunk, part] = found.get((chunk, part), 0.0) + of(times)
    return found


def place_of(unit: int) -> tuple[int, int]:
    """Microbatch and slice."""
    return (unit.microbatch, unit.slice) if isinstance(unit, Unit) else (unit, 0)


def hop_seconds(channel: Channel, group: Any) -> float:
    """One way of a message to the next rank, half of the best of five round trips.

    All ranks of ``group`` call this together. 0 where shapes vary.
    """
    if channel.shape is None:
        return 0.0
    device = channel.device
    rank, size = group.rank(), group.size()
    message = torch.zeros(channel.shape, dtype=channel.dtype, device=device)
    best = float("inf")
    channel.connect(Placement.loop(size).edges)
    for turn in (0, 1):  # pairs (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...
        first = rank % 2 == turn
        peer = rank + 1 if first else rank - 1
        dist.barrier(group)
        for _ in range(6 if 0 <= peer < size else 0):
            started = time.perf_counter()
            if first:
                channel.send(message, peer, 0)
            channel.receive(peer, 0).wait()
            if not first:
                channel.send(message, peer, 0)
            channel.finish()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if first:
                best = min(best, (time.perf_counter() - started) / 2)
    dist.barrier(group)
    return best if best < float("inf") else 0.0


def measure_link(rank: int, device: Device, arena: HostArena, group: Any) -> Rates:
    """Rates of this rank while its neighbours are quiet.

    Args:
        rank: this one's, in ``group``.
        arena: keeps the memory that it takes for this.
        group: the pipeline's process group; all ranks call this together.
    """
    nbytes = 2 * PROBE_BYTES["cuda" if device.torch_device.type == "cuda" else "cpu"]
    slot = arena.allocate(nbytes)
    assert slot is not None
    found = None
    for turn in (0, 1):
        dist.barrier(group)
        if rank % 2 == turn:
            found = measure_rates(device, slot.memory)
    dist.barrier(group)
    arena.free(slot)
    assert found is not None
    return found
