"""What does the executor add to the host's work, with real kernels?

Launching depends neither on the sequence nor on the hidden size: both are so small that the device
keeps up. A plain loop of the same passes, split where the schedule splits them, runs in turn.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from benchmarks.gpu import model as gpu
from megatron_ext.schedule import generate

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("v-half", 2), ("v-zb", 2))


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Microseconds an action, by schedule."""
    group, result = gpu.start(), {"rows": []}
    size = gpu.Size(64, 16, 4, 2, 4) if tiny else gpu.Size(256, 16, 4, 4, 16)
    layers = gpu.layers_of(size, range(size.layers))
    for name, chunks in SCHEDULES:
        plan = generate(name, size.pp, size.microbatches, chunks)
        rank = gpu.Rank(size, plan, 0, group, None, layers)
        ways = {"executor": lambda rank=rank: rank.step(timed=False)["issued"],
                "loop": lambda rank=rank: direct(rank)}  # fmt: skip
        gpu.alternate(ways, 2)
        count = len(rank.plan.ranks[0])
        row: dict[str, Any] = {"schedule": name, "actions": count}
        for way, (times, _) in gpu.alternate(ways, 3 if tiny else 15).items():
            row[f"{way}_us"] = gpu.spread((1e6 * t / count for t in times), 1)
        result["rows"].append(row)
        print(row, flush=True)
        keep(result)
    return result


def direct(rank: gpu.Rank) -> float:
    """Seconds to issue the same passes in a plain loop."""
    split = rank.plan.splits_backward
    with rank.ready():
        started = time.perf_counter()
        for number, chunk in enumerate(rank.chunks):
            chunk.set_input_tensor([None])
            for microbatch, x in enumerate(rank.inputs):
                loss = chunk(x.detach().requires_grad_(True)).float().square().mean()
                key = number, microbatch
                with rank.store.collect(key) if split else contextlib.nullcontext():
                    loss.backward()
                if split:
                    with torch.no_grad():
                        rank.store.run(key)
        took = time.perf_counter() - started
        gpu.synchronize()
        return took


if __name__ == "__main__":
    gpu.main(run)
