"""(c) Copies between the device and pinned memory: alone, both ways, while computing; and k."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.model import CUDA, DEVICE, synchronize
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice, CudaDevice, Direction
from megatron_ext.offload.rates import Rates, measure_rates

PROBE_BYTES = 512 << 20
TINY_BYTES = 1 << 20


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rates, and what copies and kernels do to each other."""
    rates = _rates(TINY_BYTES if args.tiny else PROBE_BYTES)
    rows = {name: value / 1e9 for name, value in vars(rates).items()}
    return {"gb_per_s": rows, "computing": computing(args.tiny)}


def rates_of(tiny: bool) -> tuple[float, float]:
    """Bytes per second to the host and back, alone."""
    rates = _rates(TINY_BYTES if tiny else PROBE_BYTES)
    return rates.to_host, rates.to_device


def _rates(nbytes: int) -> Rates:
    device = CudaDevice(DEVICE) if CUDA else CpuDevice()
    arena = HostArena(device.torch_device, nbytes)
    try:
        slot = arena.allocate(nbytes)
        assert slot is not None
        found = measure_rates(device, slot.memory)
        arena.free(slot)
        return found
    finally:
        arena.close()
        device.close()


def computing(tiny: bool) -> list[dict[str, Any]]:
    """Matrix products alone, and with copies one way and both ways beside them."""
    width, count = (256, 4) if tiny else (8192, 24)
    a, b = (torch.randn(width, width, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    nbytes = TINY_BYTES if tiny else PROBE_BYTES
    device = CudaDevice(DEVICE) if CUDA else CpuDevice()
    arena = HostArena(device.torch_device, 2 * nbytes)
    slots = {direction: arena.allocate(nbytes) for direction in Direction}
    near = {direction: device.allocate(nbytes) for direction in Direction}

    def once(directions: tuple[Direction, ...]) -> tuple[float, float]:
        """Seconds of the products, and of the copies."""
        synchronize()
        device.synchronize()
        started = time.perf_counter()
        ready, events = device.record(), []
        for direction in directions:
            far = slots[direction].memory
            pair = (far, near[direction])
            pair = pair if direction is Direction.TO_HOST else pair[::-1]
            stream = int(direction is Direction.TO_DEVICE)
            # Several, so that copies last about as long as the products.
            for _ in range(4):
                events.append(device.copy(stream, direction, [pair], [ready]))
        for _ in range(count):
            torch.matmul(a, b, out=out)
        done = device.record()
        done.synchronize()
        products = time.perf_counter() - started
        for event in events:
            event.synchronize()
        return products, time.perf_counter() - started

    cases = {
        "products alone": (),
        "with copies to the host": (Direction.TO_HOST,),
        "with copies to the device": (Direction.TO_DEVICE,),
        "with copies both ways": tuple(Direction),
    }
    for directions in cases.values():
        once(directions)
    rows = []
    try:
        for name, directions in cases.items():
            products, copies = zip(*(once(directions) for _ in range(5)))
            compute = statistics.median(products)
            rate = 4 * nbytes / statistics.median(copies) / 1e9 if directions else None
            rows.append({"case": name, "ms": 1e3 * compute,
                         "tflops": 2 * width**3 * count / compute / 1e12,
                         "gb_per_s_each_way": rate})  # fmt: skip
    finally:
        device.close()
        arena.close()
    return rows
