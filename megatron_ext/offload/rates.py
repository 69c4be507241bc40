"""Measured transfer rates of the host link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .device import Device, Direction


@dataclass(frozen=True)
class Rates:
    """Bytes per second of each direction, alone and while the other one runs too."""

    to_host: float
    to_device: float
    to_host_together: float
    to_device_together: float


def _copy_seconds(
    device: Device, buffers: Mapping[Direction, tuple[torch.Tensor, torch.Tensor]]
) -> dict[Direction, float]:
    """How long one copy takes in each direction that has buffers, all of them at once.

    The host waits for them. They are ordered after the work of compute, which should have ended.

    Args:
        device: with a copy stream for each direction.
        buffers: (memory of the device, memory of the host) of each direction: 1-D uint8, of one
            size, pinned where the device is CUDA.
    """
    ready = device.record()
    device.synchronize()
    started = time.perf_counter()
    events = []
    for direction, (near, far) in buffers.items():
        pair = (far, near) if direction is Direction.TO_HOST else (near, far)
        stream = int(direction is Direction.TO_DEVICE)
        events.append((direction, device.copy(stream, direction, [pair], [ready])))
    took: dict[Direction, float] = {}
    # Polled, because waiting for the slower one would hide when the faster one ended.
    while len(took) < len(events):
        for direction, event in events:
            if direction not in took and event.query():
                event.synchronize()
                took[direction] = time.perf_counter() - started
        time.sleep(0)
    return took


def measure_rates(
    device: Device,
    host: torch.Tensor,
    repeats: int = 3,
) -> Rates:
    """Copy a buffer each way alone, then both ways at once; the host waits, so at start only.

    Args:
        device: with at least two copy streams.
        host: 1-D uint8 memory of the arena (pinned, for CUDA); half of it serves each direction.
        repeats: best of so many.
    """
    half = host.numel() // 2
    out, back = Direction.TO_HOST, Direction.TO_DEVICE
    parts = {out: host[:half], back: host[half : 2 * half]}
    buffers = {direction: (device.allocate(half), part) for direction, part in parts.items()}

    def alone(direction: Direction) -> float:
        return _copy_seconds(device, {direction: buffers[direction]})[direction]

    _copy_seconds(device, buffers)  # The first use of a buffer costs more than the copy.
    best: dict[str, float] = {}
    for _ in range(repeats):
        together = _copy_seconds(device, buffers)
        for name, value in (
            ("to_host", alone(out)),
            ("to_device", alone(back)),
            ("to_host_together", together[out]),
            ("to_device_together", together[back]),
        ):
            best[name] = min(value, best.get(name, float("inf")))
    return Rates(**{name: half / value for name, value in best.items()})
