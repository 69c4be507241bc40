"""(f) Messages by NCCL between two processes, each with a GPU of its own.

In the order in which they matter: does every schedule train to the same weights bit for bit; what
a message costs under each ``--pp-p2p``, and whether two ways pass each other; how far a matrix
product slows down while a posted receive waits; how long received messages stay allocated; whether
the allocator's peak stays as it is over many steps. Every row is kept as soon as it is there. With
one GPU the two processes would share it, which NCCL refuses: the part says so. On the CPU the same
code runs over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import model
from benchmarks.gpu.keep import keep, kept
from benchmarks.gpu.model import CUDA, Rank, Size, release, synchronize
from benchmarks.gpu.shared import FAILED, exact, together, trained
from megatron_ext.integration.utils import gather
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import MessageOptions, connected
from megatron_ext.schedule import Placement, generate

WORLD, MANY = 2, 200
SCHEDULES = (("1f1b", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("v-half", 2), ("v-zb", 2))
WAYS = (
    "edge", "edge,priority=normal", "edge,ctas=1", "edge,ctas=4", "edge,announce", "edge,buffers",
    "pipeline",
)  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both processes; why not, where there is one GPU."""
    if CUDA and torch.cuda.device_count() < WORLD:
        return {"skipped": f"{torch.cuda.device_count()} GPU; NCCL needs one a process"}
    good = together("benchmarks.gpu.nccl", WORLD, args, rank_main)
    found = kept(args.into)
    return found if good else {**found, "unfinished" if found else "failed": FAILED}


def channel(group: Any, shape: tuple[int, ...], way: str) -> Channel:
    """Messages of ``shape`` over ``group``; the one place that makes them."""
    ways, options = Placement.loop(group.size()).edges, MessageOptions.parse(way)
    edges = connected(group, "passes", ways, model.DEVICE, options)
    return Channel(edges, shape, torch.bfloat16, model.DEVICE)


def rank_main(args: argparse.Namespace) -> None:
    """One of the processes; rank 0 writes what came out."""
    backend = "nccl" if CUDA else "gloo"
    if CUDA:
        model.DEVICE = torch.device("cuda", args.rank)
    group = model.start(args.rank, WORLD, f"{args.folder}/store", backend)
    size = Size(64, 16, 4, WORLD, 4) if args.tiny else Size(4096, 4096, 4, WORLD, 16)
    result: dict[str, Any] = {"backend": backend, "size": str(size), "torch": torch.__version__}
    rounds, steps = (2, 3) if args.tiny else (50, MANY)
    parts: dict[str, Iterator[dict[str, Any]]] = {
        "schedules": schedules(args.rank, group, size),
        "messages": (row(messages(group, size, way, rounds), way) for way in WAYS),
        "computing": (row(computing(group, size, way, rounds), way) for way in WAYS),
        "held": (row(held(group, size, way), way) for way in WAYS if way != "pipeline"),
        "memory": memory(args.rank, group, size, steps),
    }
    for name, part in parts.items():
        for found in part:
            result.setdefault(name, []).append(found)
            if args.rank == 0:
                print(f"nccl: {name}: {found}", flush=True)
                keep(args.into, result)
    dist.barrier(group)


def row(found: dict[str, float], way: str) -> dict[str, Any]:
    """The slower rank's times."""
    every = gather(found)
    return {"way": way, **{key: max(one[key] for one in every) for key in found}}


def schedules(rank: int, group: Any, size: Size) -> Iterator[dict[str, Any]]:
    """Losses and weights of some steps under every schedule, and their times."""
    first: dict[str, Any] = {}
    for number, (name, chunks) in enumerate(SCHEDULES):
        plan = generate(name, size.pp, size.microbatches, chunks)
        one = Rank(size, plan, rank, group, channel(group, size.shape, "edge"))
        with exact() as deterministic:
            found = trained(one)
        one.close()
        first = first or found
        equal = all(found[key] == first[key] for key in ("losses", "weights"))
        yield {"schedule": name, "control": number == 1, "equal": equal,
               "deterministic": deterministic, "step_ms": 1e3 * found["seconds"]}  # fmt: skip


def messages(group: Any, size: Size, way: str, rounds: int) -> dict[str, float]:
    """Milliseconds of one message there and back, and of two that pass each other, where a receive
    is posted ahead of the send on both ranks."""
    pipe, rank = channel(group, size.shape, way), group.rank()
    peer, tensor = 1 - rank, torch.ones(size.shape, dtype=torch.bfloat16, device=model.DEVICE)

    def there_and_back(number: int) -> None:
        if rank == 0:
            pipe.send(tensor, peer, 2 * number)
            pipe.receive(peer, 2 * number + 1).wait()
        else:
            pipe.send(pipe.receive(peer, 2 * number).wait(), peer, 2 * number + 1)

    def crossing(number: int) -> None:
        if pipe.options.own:
            receipt = pipe.receive(peer, number)
            pipe.send(tensor, peer, number)
        elif rank == 0:  # one stream: a posted receive would hold back its own answer
            pipe.send(tensor, peer, number)
            receipt = pipe.receive(peer, number)
        else:
            receipt = pipe.receive(peer, number)
            pipe.send(tensor, peer, number)
        receipt.wait()

    found = {}
    for name, exchange in (("there_and_back_ms", there_and_back), ("crossing_ms", crossing)):
        times = []
        for number in range(rounds):
            dist.barrier(group)
            synchronize()
            started = time.perf_counter()
            exchange(number)
            synchronize()
            times.append(time.perf_counter() - started)
            pipe.finish()
        found[name] = 1e3 * statistics.median(times)
    return found


def computing(group: Any, size: Size, way: str, rounds: int) -> dict[str, float]:
    """Milliseconds of matrix products alone, and while a posted receive waits for its peer.

    The peer sends only when the products are done, so all of the difference is what the waiting
    kernel takes from them.
    """
    pipe, rank = channel(group, size.shape, way), group.rank()
    hosts = dist.new_group(backend="gloo")  # waits without a device's stream
    peer, h = 1 - rank, size.hidden
    a, b = (torch.randn(h, h, device=model.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    message = torch.ones(size.shape, dtype=torch.bfloat16, device=model.DEVICE)

    alone, beside = [], []
    for number in range(rounds):
        synchronize()
        alone.append(products(a, b))
        receipt = pipe.receive(peer, number) if rank == 0 else None
        if rank == 0:
            time.sleep(1e-3)  # until its kernel is resident
            beside.append(products(a, b))
        dist.barrier(hosts)
        if receipt is None:
            pipe.send(message, peer, number)
        else:
            receipt.wait()
        synchronize()
        pipe.finish()
    dist.destroy_process_group(hosts)
    if rank != 0:
        return {"alone_ms": 0.0, "beside_receive_ms": 0.0, "slower_percent": float("-inf")}
    one, other = statistics.median(alone), statistics.median(beside)
    slower = 100 * (other / one - 1)
    return {"alone_ms": 1e3 * one, "beside_receive_ms": 1e3 * other, "slower_percent": slower}


def held(group: Any, size: Size, way: str) -> dict[str, float]:
    """How many received messages stay allocated when nothing uses them any more, while the next
    receive waits for its peer: freed memory that the allocator cannot give out."""
    pipe, rank = channel(group, size.shape, way), group.rank()
    hosts = dist.new_group(backend="gloo")
    message = torch.ones(size.shape, dtype=torch.bfloat16, device=model.DEVICE)
    found = 0.0
    for number in (0, 2):  # the second time with all buffers made
        receipts = [pipe.receive(1, number + ahead) for ahead in (0, 1)] if rank == 0 else []
        dist.barrier(hosts)
        if rank == 1:
            pipe.send(message, 0, number)
        else:
            receipts.pop(0).wait()  # and is dropped
            synchronize_compute()
            torch.empty_like(message)  # makes the allocator look what is free
            if CUDA:
                stats = torch.cuda.memory_stats()
                kinds = (stats[f"{kind}_bytes.all.current"] for kind in ("active", "allocated"))
                active, allocated = kinds
                found = (active - allocated) / message.nbytes
        dist.barrier(hosts)
        if rank == 1:
            pipe.send(message, 0, number + 1)
        for receipt in receipts:
            receipt.wait()
        synchronize()
        pipe.finish()
    dist.destroy_process_group(hosts)
    return {"messages": found}


def products(a: torch.Tensor, b: torch.Tensor) -> float:
    """Seconds of the products, without waiting for other streams."""
    started = time.perf_counter()
    for _ in range(8):
        torch.mm(a, b)
    synchronize_compute()
    return time.perf_counter() - started


def synchronize_compute() -> None:
    """Wait for this stream alone: the receive's goes on waiting."""
    if CUDA:
        torch.cuda.current_stream().synchronize()


def memory(rank: int, group: Any, size: Size, steps: int) -> Iterator[dict[str, Any]]:
    """The allocator's peak of early and of all steps, its reserve, and how often it had to retry;
    ``v-half``. Nothing may grow: the host is ahead of the device by another number of passes in
    every step."""
    plan = generate("v-half", size.pp, size.microbatches, 2)
    one = Rank(size, plan, rank, group, channel(group, size.shape, "edge"))
    peaks = []
    for _ in range(steps):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        one.step(timed=False)
        peaks.append(torch.cuda.max_memory_allocated() if CUDA else 0)
    stats = torch.cuda.memory_stats() if CUDA else {}
    one.close()
    release()
    mine = {
        "steps": steps,
        "peak_early": max(peaks[1:10]),
        "peak": max(peaks[1:]),
        "reserved": stats.get("reserved_bytes.all.peak", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }
    yield max(gather(mine), key=lambda found: found["peak"])


def main() -> None:
    """One process of a GPU's run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--into", type=Path, required=True)
    rank_main(parser.parse_args())


if __name__ == "__main__":
    main()
