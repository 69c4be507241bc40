"""How fast are copies: alone, both ways at once, and beside matrix products?"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu import model as gpu
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import Direction, device_for
from megatron_ext.offload.rates import Rates, measure_rates

COPIES = 4
CASES = {
    "nothing": (),
    "copies to the host": (Direction.TO_HOST,),
    "copies to the device": (Direction.TO_DEVICE,),
    "copies both ways": tuple(Direction),
}


def rates_of(tiny: bool) -> Rates:
    """Bytes per second to the host and back, alone and both at once."""
    nbytes = 1 << 20 if tiny else 512 << 20
    device, arena = device_for(gpu.DEVICE), HostArena(gpu.DEVICE, nbytes)
    try:
        return measure_rates(device, arena.allocate(nbytes).memory)
    finally:
        arena.close()
        device.close()


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rates, then products beside copies, in alternating rounds."""
    rates = [{"copies": k.replace("_", " "), "gb_per_s": round(v / 1e9, 1)}
             for k, v in vars(rates_of(tiny)).items()]  # fmt: skip
    result: dict[str, Any] = {"rates": rates, "rows": []}
    keep(result)
    width, count, nbytes = (256, 4, 1 << 20) if tiny else (8192, 24, 512 << 20)
    a, b = (torch.randn(width, width, device=gpu.DEVICE).to(gpu.BF16) for _ in range(2))
    device, arena = device_for(gpu.DEVICE), HostArena(gpu.DEVICE, 2 * nbytes)
    far = {direction: arena.allocate(nbytes).memory for direction in Direction}
    near = {direction: device.allocate(nbytes) for direction in Direction}

    def once(directions: tuple[Direction, ...]) -> tuple[float, float]:
        """Seconds of the products, and of the copies."""
        gpu.synchronize()
        device.synchronize()
        started, ready, events = time.perf_counter(), device.record(), []
        for direction in directions:
            pair = (far[direction], near[direction])
            pair = pair if direction is Direction.TO_HOST else pair[::-1]
            stream = int(direction is Direction.TO_DEVICE)
            for _ in range(COPIES):
                events.append(device.copy(stream, direction, [pair], [ready]))
        for _ in range(count):
            torch.matmul(a, b)
        device.record().synchronize()
        products = time.perf_counter() - started
        for event in events:
            event.synchronize()
        return products, time.perf_counter() - started

    gpu.warm(0 if tiny else 3)
    ways = {name: lambda d=directions: once(d) for name, directions in CASES.items()}
    gpu.alternate(ways, 1)
    for name, (times, clock) in gpu.alternate(ways, 2 if tiny else gpu.ROUNDS).items():
        products, copies = zip(*times, strict=True)
        seconds = gpu.spread(products, 6)
        result["rows"].append({
            "case": name, "ms": [1e3 * s for s in seconds],
            "tflops": round(2 * width**3 * count / seconds[0] / 1e12, 1),
            "gb_per_s_each_way": round(COPIES * nbytes / gpu.spread(copies)[0] / 1e9, 1)
            if CASES[name] else None, **clock,
        })  # fmt: skip
    device.close()
    arena.close()
    return result


if __name__ == "__main__":
    gpu.main(run)
