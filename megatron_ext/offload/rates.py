"""Measured transfer rates of the host link, and the transfer policy that fits them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .device import Device, Direction
from .engine import Policy

# Full duplex has to beat alternation by this factor before its second stream is worth it.
DUAL_GAIN = 1.15
# A neighbour on the same switch counts if it slows a copy by this factor.
CROWDED_LOSS = 1.25


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


def choose_policy(alone: Rates, crowded: Rates | None = None) -> tuple[Policy, str]:
    """The transfer policy that measurements speak for, and why.

    Args:
        alone: of this rank while its neighbour is quiet.
        crowded: measured while the neighbour behind the same switch copies the same way at the
            same time; None: there is no such neighbour.
    """
    if crowded is not None:
        loss = max(alone.to_host / crowded.to_host, alone.to_device / crowded.to_device)
        if loss > CROWDED_LOSS:
            return Policy.PAIRED, f"the neighbour going the same way slows copies {loss:.2f} times"
    in_turn = 1 / alone.to_host + 1 / alone.to_device  # a byte out and one in
    gain = in_turn / max(1 / alone.to_host_together, 1 / alone.to_device_together)
    if gain > DUAL_GAIN:
        return Policy.DUAL, f"both directions at once are {gain:.2f} times as fast as in turn"
    return Policy.SINGLE, f"both directions at once gain only {gain:.2f} times"
