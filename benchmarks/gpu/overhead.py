"""(d) What the executor adds to the host's work with real kernels, and who waits for whom.

With sequences so short that the device keeps up, the host's time is that of launching. Launching
does not depend on the sequence, so it is compared with the device's time at a real one: where it
is longer, a run would be bound by launching (CUDA graphs are off).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.gpu.model import Rank, Size, inputs, release, start, synchronize
from megatron_ext.schedule import generate

CASES = (("1f1b", 1), ("interleaved", 2), ("v-half", 2), ("v-zb", 2))
SHORT = 16
ROUNDS = 5


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Per size: launching a pass with and without the executor, and the device's time."""
    group = start()
    sizes = [Size(64, 32, 4, 2, 4)] if args.tiny else [Size(1024, 4096, 4, 4, 16),
                                                       Size(4096, 4096, 4, 4, 16)]  # fmt: skip
    rows, rounds = [], 1 if args.tiny else ROUNDS
    for size in sizes:
        short = Size(size.hidden, SHORT, size.layers, size.pp, size.microbatches)
        for name, chunks in CASES:
            plan = generate(name, size.pp, size.microbatches, chunks)
            rank = Rank(short, plan, 0, group, None)
            rank.step()
            launching = statistics.median(rank.step(timed=False)["issued"] for _ in range(rounds))
            thread = statistics.median(rank.step(timed=False)["thread"] for _ in range(rounds))
            alone = statistics.median(direct(rank) for _ in range(rounds))
            actions = len(rank.actions())
            rank.close()
            real = Rank(size, plan, 0, group, None)
            real.step()
            real.step()
            device = sum(seconds for _, seconds in real.recorder.durations())
            real.close()
            release()
            row = {"hidden": size.hidden, "seq": size.seq, "schedule": name, "actions": actions,
                   "host_us": 1e6 * launching / actions, "thread_us": 1e6 * thread / actions,
                   "alone_us": 1e6 * alone / actions, "device_us": 1e6 * device / actions,
                   "bound_by_launching": launching > device}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            args.keep({"rows": rows})
    return {"rows": rows}


def direct(rank: Rank) -> float:
    """Seconds to issue the same forward and whole backward passes in a plain loop."""
    size = rank.size
    synchronize()
    started = time.perf_counter()
    for chunk in rank.chunks:
        chunk.set_input_tensor([None])
        for x in inputs(size):
            chunk(x).float().square().mean().backward()
    took = time.perf_counter() - started
    synchronize()
    return took
