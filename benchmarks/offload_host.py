#!/usr/bin/env python3
"""Host time of offload for each saved tensor, without what the device's functions take.

    python -m benchmarks.offload --per-tensor [--against CHECKOUT] [--repeats 9] [--output DIR]

One autograd node saves tensors of storages of their own, and the set makes its way there and back
on a device that copies nothing and has all memory at hand. A trip is timed beside the same passes
without a store, in turn; the difference is pack, unpack, and the share of the four actions. With
``--against``, two processes in turn, one with the package of another checkout. Writes a section of
offload.md, and results/DATE-offload-host.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore

Row = dict[str, Any]
TENSORS, SHAPE, TRIPS = 100, (64, 32), 60
PARTS = ("forward and pack", "OFFLOAD", "RELEASE", "PREPARE", "RELOAD", "backward and unpack")


class NoDevice(CpuDevice):
    """Copies nothing, and hands out memory that is there."""

    def __init__(self) -> None:
        super().__init__()
        # Each as bytes and in the form of the tensor that was saved.
        self.memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, *args: Any) -> Any:
        """An event of the past."""
        return self.record()

    def allocate(self, nbytes: int, form: Any = None) -> torch.Tensor:
        """One of ``memory``."""
        return self.memory.pop()[form is not None]


class Save(torch.autograd.Function):
    """Saves tensors and asks for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """The input, as it is."""
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradient, as it is."""
        assert len(ctx.saved_tensors) == TENSORS
        return (grad, *(None,) * TENSORS)


def trip(store: ActivationStore | None, device: NoDevice | None, key: Any) -> list[float]:
    """Seconds of each of ``PARTS``."""
    x = torch.zeros(1, requires_grad=True)
    tensors = [torch.empty(SHAPE) for _ in range(TENSORS)]
    if device is not None:
        pieces = [torch.empty(SHAPE) for _ in range(TENSORS)]
        device.memory = [(piece.view(torch.uint8).flatten(), piece) for piece in pieces]
    times = [time.perf_counter()]
    if store is None:
        y = Save.apply(x, *tensors)
    else:
        with store.saving(key):
            y = Save.apply(x, *tensors)
        store.footprint(key)
    times.append(time.perf_counter())
    for action in PARTS[1:-1]:
        if store is not None:
            getattr(store, action.lower())(key)
        times.append(time.perf_counter())
    y.backward()
    if store is not None:
        store.finish(key)
    times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def trips() -> dict[str, float]:
    """Microseconds a tensor: medians of trips, less those without a store."""
    torch.set_num_threads(1)
    device = NoDevice()
    store = ActivationStore(Engine(device, HostArena(device.torch_device, 1 << 23)), min_bytes=1)
    moved, plain = [], []
    for number in range(TRIPS + 5):
        moved.append(trip(store, device, (0, number)))
        plain.append(trip(None, None, None))
        if number % 8 == 7:
            store.end_step()
    device.close()
    found = {}
    for part, ours, theirs in zip(PARTS, zip(*moved[5:]), zip(*plain[5:])):
        found[part] = 1e6 * (statistics.median(ours) - statistics.median(theirs)) / TENSORS
    return {**found, "all": sum(found.values())}


def measure(args: argparse.Namespace) -> Row:
    """All repeats, each in a process of its own: Python of this package, or of another checkout."""
    versions = {"now": Path(__file__).resolve().parent.parent}
    if args.against is not None:
        versions["before"] = args.against.resolve()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    load = os.getloadavg()[0]
    for _ in range(args.repeats):
        for name, root in versions.items():
            # By its path: the package is the other checkout's, this file is not.
            command = [sys.executable, __file__]
            environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            rounds[name].append(json.loads(out.stdout))
            print(name, rounds[name][-1], flush=True)
    about = {"date": args.date, "repeats": args.repeats, "machine": args.machine, "load": load}
    return {**about, "rounds": rounds}


def section(data: Row | None) -> list[Any]:
    """The results in Markdown; nothing if there are none."""
    from benchmarks.page import ratio, table  # not of the other checkout, which may have none

    if data is None:
        return []
    rounds = data["rounds"]
    names = [name for name in ("before", "now") if name in rounds]

    def of(name: str) -> Callable[[str], str]:
        def cell(part: str) -> str:
            found = [one[part] for one in rounds[name]]
            return f"{statistics.median(found):.1f} ({min(found):.1f})"

        return cell

    def change(part: str) -> str:
        now, before = ([one[part] for one in rounds[name]] for name in ("now", "before"))
        return f"{ratio(now, before):.2f}"

    columns: dict[str, Callable[[str], str]] = {"part": str, **{name: of(name) for name in names}}
    columns |= {"ratio": change} if len(names) == 2 else {}
    return [
        "## Host time of a saved tensor",
        f"`python -m benchmarks.offload --per-tensor`, {data['date']}: microseconds of Python for "
        f"each saved tensor ({TENSORS} a set, {TRIPS} trips), without the device's own calls "
        f"(allocation, copies, events); median (least) of {data['repeats']} processes in turn; "
        f"{data['machine']}, load {data['load']:.1f}. *Ratio*: median of the rounds' ratios.",
        table(columns, (*PARTS, "all")),
    ]


if __name__ == "__main__":
    print(json.dumps(trips()))
