"""(d) What the executor adds to the host's work with real kernels, and who waits for whom.

Launching depends neither on the sequence nor on the hidden size, and is measured with both so small
that the device keeps up: at hidden 4096 it would read and write weights for longer than the host
launches, and the host would wait for room in the launch queue. It is compared with the device's
time at a real size: where it is longer, a run would be bound by launching without CUDA graphs.

Autograd runs backward passes in a thread of its own on CUDA, so processor time is that of the
process. Schedules with W are compared with a plain loop whose backward passes are split, too.

Last, so that a failed capture costs nothing else: ``1f1b`` with Megatron's local CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.model import CUDA, AtHome, Rank, Size, inputs, release, start, synchronize
from megatron_ext.schedule import generate
from megatron_ext.schedule.schedule import Schedule

CASES = (("1f1b", 1), ("interleaved", 2), ("v-half", 2), ("v-zb", 2))
SHORT, NARROW = 16, 256
ROUNDS = 12


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Per schedule: launching a pass with and without the executor; per size: the device's time."""
    group = start()
    sizes = [Size(64, 32, 4, 2, 4)] if args.tiny else [Size(1024, 4096, 4, 4, 16),
                                                       Size(4096, 4096, 4, 4, 16)]  # fmt: skip
    rows: list[dict[str, Any]] = []
    rounds = 1 if args.tiny else ROUNDS
    for name, chunks in CASES[::3] if args.tiny else CASES:
        plan = generate(name, sizes[0].pp, sizes[0].microbatches, chunks)
        host = launching(plan, sizes[0], group, rounds)
        for size in sizes:
            real = Rank(size, plan, 0, group, None)
            real.step()
            real.step()
            device = sum(seconds for _, seconds in real.recorder.durations())
            actions = len(real.actions())
            real.close()
            release()
            row = {"hidden": size.hidden, "seq": size.seq, "schedule": name, "actions": actions,
                   **host, "device_us": 1e6 * device / actions}  # fmt: skip
            row["bound_by_launching"] = host["host_us"] > row["device_us"]
            rows.append(row)
            print(row, flush=True)
            args.keep({"rows": rows})
    return {"rows": rows, "graphs": graphs(sizes[0], group, rounds)}


def launching(plan: Schedule, size: Size, group: Any, rounds: int) -> dict[str, Any]:
    """Microseconds an action at a small size: under the executor and in a plain loop, in turn; of
    each the least, since whatever else the host does only adds to them."""
    short = Size(min(size.hidden, NARROW), SHORT, size.layers, size.pp, size.microbatches)
    rank = Rank(short, plan, 0, group, None)
    rank.step()
    direct(rank)
    steps, alone = [], []
    for _ in range(rounds):
        steps.append(rank.step(timed=False))
        alone.append(direct(rank))
    actions = len(rank.actions())
    rank.close()
    least = {key: min(step[key] for step in steps) for key in ("issued", "cpu", "took")}
    return {
        "host_us": 1e6 * least["issued"] / actions,
        "cpu_us": 1e6 * least["cpu"] / actions,
        "alone_us": 1e6 * min(alone) / actions,
        "device_keeps_up": least["took"] < 1.5 * least["issued"],
    }


def graphs(size: Size, group: Any, rounds: int) -> list[dict[str, Any]]:
    """``1f1b`` on the last rank, whose losses are compared, without CUDA graphs and with them."""
    if not CUDA:
        return [{"way": "local CUDA graphs", "skipped": "no CUDA device"}]
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    short = Size(min(size.hidden, NARROW), SHORT, size.layers, size.pp, size.microbatches)
    plan = generate("1f1b", size.pp, size.microbatches, 1)
    model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
    rows: list[dict[str, Any]] = []
    for way, on in (("no graphs", False), ("local CUDA graphs", True)):
        torch.manual_seed(1)  # of the messages
        try:
            rank = Rank(short, plan, size.pp - 1, group, AtHome(short.shape), on)
            rank.step(timed=False)
            steps = [rank.step(timed=False) for _ in range(rounds + 1)][1:]
            losses, count = [loss.hex() for loss in rank.losses], len(rank.actions())
            rank.close()
            row = {key: 1e6 * statistics.median(step[name] for step in steps) / count
                   for key, name in (("host_us", "issued"), ("step_us", "took"))}  # fmt: skip
            equal = losses == (rows[0]["losses"] if rows and "losses" in rows[0] else losses)
            rows.append({"way": way, **row, "equal": equal, "losses": losses})
        except Exception as error:
            why = str(error).partition("\n")[0]
            rows.append({"way": way, "failed": f"{type(error).__name__}: {why}"})
        print(rows[-1], flush=True)
    return rows


def direct(rank: Rank) -> float:
    """Seconds to issue the same passes in a plain loop, split into B and W where the plan does."""
    size, store, split = rank.size, rank.store, rank.plan.splits_backward
    synchronize()
    started = time.perf_counter()
    for number, chunk in enumerate(rank.chunks):
        chunk.set_input_tensor([None])
        for microbatch, x in enumerate(inputs(size)):
            loss = chunk(x).float().square().mean()
            key = number, microbatch
            with store.collect(key) if split else contextlib.nullcontext():
                loss.backward()
            if split:
                with torch.no_grad():
                    store.run(key)
    took = time.perf_counter() - started
    synchronize()
    return took
