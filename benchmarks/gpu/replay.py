"""(a) The list of one rank of a pipeline on the device, its peers emulated.

Times of F, B and W come from events around the passes, memory from the allocator and from our own
count of activation sets; the whole pipeline's step is then simulated from the measured times.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.model import CUDA, DEVICE, Rank, Size, release, start
from benchmarks.gpu.transfers import rates_of
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice, CudaDevice
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from megatron_ext.schedule import Costs, Link, generate, offload_pass, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.schedule import Schedule

# (schedule, chunks, offload)
CASES = (
    ("1f1b", 1, None),
    ("interleaved", 2, None),
    ("v-min", 2, None),
    ("v-half", 2, None),
    ("v-zb", 2, None),
    ("po", 4, None),
    ("po", 4, "half"),
    ("po", 4, "full"),
)
FULL = {"replay": Size(4096, 4096, 4, 8, 16), "wide": Size(8192, 4096, 4, 8, 16)}
TINY = {"replay": Size(64, 32, 4, 2, 4), "wide": Size(128, 32, 4, 2, 4)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All cases at the part's size, each on its own: what one cannot do is a row that says so."""
    group = start()
    to_host, to_device = rates_of(args.tiny)
    size = (TINY if args.tiny else FULL)[args.name]
    cases = CASES[:2] if args.tiny and args.name == "wide" else CASES
    rows = []
    known: dict[str, float] = {}
    for name, chunks, offload in cases:
        what = name if offload is None else f"{name}, offload {offload}"
        try:
            row = measure(size, (name, chunks, offload), (to_host, to_device), known, group)
        except Exception as error:
            why = str(error).partition("\n")[0]
            row = {"failed": f"{type(error).__name__}: {why}"}
            # Its frames hold the failed rank's memory.
            error.__traceback__ = None
            del error
        release()
        rows.append({"size": dataclasses.asdict(size), "schedule": what, **row})
        print(f"{size}: {what}: {row}", flush=True)
        args.keep({"rows": rows, "to_host": to_host, "to_device": to_device})
    return {"rows": rows, "to_host": to_host, "to_device": to_device}


def measure(
    size: Size,
    case: tuple[str, int, str | None],
    rates: tuple[float, float],
    known: dict[str, float],
    group: Any,
) -> dict[str, Any]:
    """One case. ``known`` collects what later cases plan with: bytes of a set of one layer, the
    whole pass of a layer, the simulated step of 1F1B."""
    name, chunks, offload = case
    base = generate(name, size.pp, size.microbatches, chunks)
    plan = base
    if offload is not None:
        if "layer_seconds" not in known:
            raise RuntimeError("1f1b, which measures what the link is planned with, has failed")
        set_bytes = known["set_bytes"] * size.layers / chunks
        seconds = known["layer_seconds"] * size.layers / chunks
        there, back = (set_bytes / rate / seconds for rate in rates)
        link = Link.of(size.pp, there, back)
        plan = offload_pass(base, link, offload).schedule
    peaks = simulate(plan).peak_sets
    at = peaks.index(max(peaks))
    rank = Rank(size, plan, at, group, None)
    try:
        row = _measured(size, case, rank, plan, known)
        row["copy_ms"] = [1e3 * row["set_bytes"] / rate for rate in rates]
        return row
    finally:
        rank.close()


def _measured(
    size: Size,
    case: tuple[str, int, str | None],
    rank: Rank,
    plan: Schedule,
    known: dict[str, float],
) -> dict[str, Any]:
    name, _, offload = case
    set_bytes = set_size(rank, size)
    if name == "1f1b":
        known["set_bytes"] = set_bytes / size.layers
    rank.step()  # makes the gradients, measures what is offloaded
    rank.step()
    if CUDA:
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    steps = [rank.step() for _ in range(2)]
    peak = torch.cuda.max_memory_allocated() - resting if CUDA else None
    passes = rank.passes()
    work = sum(passes.values())
    if name == "1f1b":
        known["layer_seconds"] = work / size.layers
    step = simulated(plan, passes, rank.rank, size)
    if name == "1f1b":
        known["step"] = step
    sets = rank.recorder.peak_sets
    return {
        "rank": rank.rank,
        "passes_ms": {
            f"{op.value}{chunk}": round(1e3 * seconds, 3) for (chunk, op), seconds in passes.items()
        },
        "step_ms": 1e3 * min(step_["took"] for step_ in steps),
        "work_ms": 1e3 * work * size.microbatches,
        "set_bytes": set_bytes,
        "peak_sets": sets,
        "planned_sets": rank.report.peak_sets[rank.rank],
        "counted_bytes": sets * set_bytes,
        "allocator_bytes": peak,
        "moved_sets": rank.report.offloaded_sets[rank.rank] if offload else 0,
        "pipeline_ms": 1e3 * step,
        "speed": known["step"] / step if "step" in known else None,
    }


def set_size(rank: Rank, size: Size) -> int:
    """Bytes that autograd keeps for a microbatch of one chunk, parameters left out."""
    device = CudaDevice(DEVICE) if CUDA else CpuDevice()
    engine = Engine(device, HostArena(device.torch_device), "single")
    chunk = rank.chunks[0]
    store = ActivationStore(engine, chunk.parameters, min_bytes=1)
    x = torch.randn(size.shape, device=DEVICE).to(torch.bfloat16).requires_grad_(True)
    chunk.set_input_tensor([None])
    with store.saving((0, 0)):
        y = chunk(x)
    found = store.footprint((0, 0)).device
    del y
    store.finish((0, 0))
    engine.close()
    return found


def simulated(plan: Schedule, passes: dict[tuple[int, Op], float], rank: int, size: Size) -> float:
    """Seconds of the whole pipeline's step: every stage as the measured ones, without messages."""
    chunks: Sequence[int] = range(plan.chunks)
    rows = []
    for chunk in chunks:
        forward = passes[chunk, Op.F]
        if (chunk, Op.BW) in passes:
            halves = [passes[chunk, Op.BW] / 2] * 2
        else:
            halves = [passes[chunk, Op.B], passes[chunk, Op.W]]
        rows.append([round(1e9 * seconds) for seconds in (forward, *halves)])
    placement = plan.placement
    stages = [rows[placement.chunk_of(stage)] for stage in range(placement.num_stages)]
    return float(simulate(plan, Costs.of(stages=stages)).makespan) / 1e9
