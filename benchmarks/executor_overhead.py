#!/usr/bin/env python3
"""What the executor itself costs the CPU, per pass, beside Megatron's functions and PyTorch's.

    python -m benchmarks.executor_overhead [--pp 4] [--microbatches 16] [--steps 10] [--rounds 9]
        [--sizes 8x64,16x128] [--check] [--output DIR] [--date YYYY-MM-DD]

The emulated model of ``rivals.py`` without its pauses, on gloo ranks of this machine, executors in
turn in one process group. Counted is the CPU time of a rank's main thread (and of all its threads)
over a step, per pass: waiting costs nothing, so the ranks may share two cores. A pass is F, B, W
or BW; what the model alone takes is measured too. Also: what the watchdog and the recorded
timeline add, and how long schedules take to be made, lowered and checked. Writes
results/DATE-executor-overhead.json and executor_overhead.md; ``--check`` exits with 1 if ours
takes more than stock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import rivals
from benchmarks.ranks import add_arguments, measured, save
from benchmarks.rivals import MegatronWay, Ours, Stage, Torch, Way, stock
from megatron_ext.integration.pipeline import ScheduledPipeline
from megatron_ext.integration.plans import Plans
from megatron_ext.integration.utils import gather
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import check, generate, lower

HERE = Path(__file__).resolve().parent

OURS = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "v-half", "v-zb")
# Ours inside Megatron, called with the same model and functions as stock.
INSIDE = {
    "ours in Megatron 1f1b": "stock 1f1b",
    "ours in Megatron interleaved": "stock interleaved",
}
MADE = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "v-min", "v-half", "v-zb", "po")


class NoWatchdog:
    """In place of the watchdog, to see what that costs."""

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Nothing."""
        yield

    def at(self, *_: Any) -> None:
        """Nothing."""

    def waiting(self, *_: Any) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Row:
    """One executor with one schedule; microseconds of CPU per pass, of the busiest rank.

    Attributes:
        passes: F, B, W and BW of a rank in one step.
        thread, least: of the main thread, median and minimum of the rounds.
        process: of all threads, median.
    """

    name: str
    passes: int
    thread: float
    least: float
    process: float


def inside(name: str, chunks: int, rank: int, args: argparse.Namespace) -> MegatronWay:
    """Our forward-backward function as Megatron's training loop would call it."""
    pp, m = args.pp, args.microbatches
    placement = generate(name, pp, m, chunks).placement
    plans = Plans(lambda count: generate(name, pp, count, chunks), lambda count: None, placement)
    pipeline = ScheduledPipeline(plans, WeightGradStore(), 300.0)
    return MegatronWay(f"ours in Megatron {name}", pipeline, rank, placement, m)


def everything(rank: int, args: argparse.Namespace) -> list[Way]:
    """All executors, then ours in parts."""
    pp, m = args.pp, args.microbatches
    found: list[Way] = [stock(1, rank, pp, m), inside("1f1b", 1, rank, args)]
    found += [stock(2, rank, pp, m), inside("interleaved", 2, rank, args)]
    watchdog = Watchdog(f"rank {rank}", 300.0)
    found += [Ours(generate(name, pp, m), rank, watchdog) for name in OURS]
    found += [Torch(name, rank, pp, m) for name in rivals.TORCH if name != "DualPipeV"]
    for name in ("1f1b", "v-half"):
        bare = Ours(generate(name, pp, m), rank, NoWatchdog())  # type: ignore[arg-type]
        bare.name += ", no watchdog"
        timed = Ours(generate(name, pp, m), rank, watchdog, timed=True)
        timed.name += ", timed"
        found += [bare, timed]
    return found


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """All executors on one rank; rank 0 writes what came out."""
    rivals.start(rank, args.pp, folder)
    ways = everything(rank, args)
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    alone = []
    passes = {}
    for way in ways:
        way.step()
        # Not the log's length: PyTorch's whole backward passes are noted there in two halves.
        passes[way.name] = len(way.order(gather(way.log)).ranks[rank])
    for number in range(args.rounds + 1):
        for way in ways:
            dist.barrier()
            thread, process = time.thread_time(), time.process_time()
            for _ in range(args.steps):
                way.step()
            thread, process = time.thread_time() - thread, time.process_time() - process
            if number:  # The first round warms up.
                each = 1e6 / args.steps / passes[way.name]
                taken[way.name].append((thread * each, process * each))
        alone.append(model_alone(args.microbatches * args.steps))
    rows = []
    for way in ways:
        threads, processes = zip(*taken[way.name])
        mine = (statistics.median(threads), min(threads), statistics.median(processes))
        busiest = max(gather(mine))
        rows.append(Row(way.name, passes[way.name], *busiest))
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        model = statistics.median(alone)
        data = {"rows": [asdict(row) for row in rows], "model": model}
        (folder / "rows.json").write_text(json.dumps(data))
    dist.barrier()


def model_alone(microbatches: int) -> float:
    """Microseconds of a pass of the model without an executor: F and BW, one after the other."""
    stage = Stage(1, 3, None, [])
    xs = [x.requires_grad_(True) for x in rivals.batch(microbatches)]
    grad = rivals.torch.ones(rivals.SHAPE)
    started = time.thread_time()
    for x in xs:
        rivals.torch.autograd.backward(stage(x), grad)
    return (time.thread_time() - started) * 1e6 / (2 * microbatches)


def making(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds to make, lower and check schedules, best of three; PyTorch's to construct its
    own, which includes its lowering, for the first size only (the larger ones take it minutes)."""
    rows = []
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    for pp, m in sizes:
        for name in MADE:
            times = []
            for _ in range(3):
                moments = [time.perf_counter()]
                plan = generate(name, pp, m)
                moments.append(time.perf_counter())
                lowered = lower(plan)
                moments.append(time.perf_counter())
                check(lowered)
                moments.append(time.perf_counter())
                times.append([1e3 * (b - a) for a, b in pairwise(moments)])
            made, lowered_ms, checked = map(min, zip(*times))
            rows.append({"name": f"ours {name}", "pp": pp, "microbatches": m, "make": made,
                         "lower": lowered_ms, "check": checked})  # fmt: skip
    pp, m = sizes[0]
    for name, _, _ in rivals.torch_lists.CLASSES:
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            rivals.torch_lists.construct(name, pp, m)
            seconds.append(time.perf_counter() - started)
        rows.append({"name": name, "pp": pp, "microbatches": m, "make": 1e3 * min(seconds),
                     "lower": None, "check": None})  # fmt: skip
    return rows


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Ours against stock, for the same passes: (what, measured, whether it holds)."""
    here = {row["name"]: row for row in rows}
    found = []
    for mine, theirs in INSIDE.items():
        a, b = here[mine], here[theirs]
        what = f"{mine} takes no more CPU a pass than {theirs}"
        text = f"{a['thread']:.0f} against {b['thread']:.0f} µs"
        found.append((what, text, a["passes"] == b["passes"] and a["thread"] <= b["thread"]))
    return found


def page(data: dict[str, Any], about: dict[str, Any]) -> str:
    """The results in Markdown."""
    rows, found = data["rows"], claims(data["rows"])
    lines = [
        "# What the executor costs",
        "",
        f"`python -m benchmarks.executor_overhead`, {about['date']}: {about['pp']} gloo ranks in "
        f"one process group, {about['microbatches']} microbatches, median of {about['rounds']} "
        f"alternating rounds of {about['steps']} steps; Python {about['python']}, torch "
        f"{about['torch']}, megatron-core {about['megatron']}, {about['machine']}, ranks at "
        f"{about['priority']}, load {about['load']}.",
        "",
        "Microseconds of CPU time per pass (F, B, W or BW) on the busiest rank, without any "
        "compute to speak of: the main thread's, which is what a GPU's kernels are launched from, "
        "and that of all threads (gloo's, the watchdog's). A split pass does less each than a "
        f"whole one. The model alone takes {data['model']:.0f} µs a pass. *In Megatron* is our "
        "forward-backward function with stock's arguments, model and `forward_step`; the other "
        "rows of ours are the executor over plain autograd, as PyTorch's are. From run to run "
        "figures differ by some 5 µs.",
        "",
        "| to be shown | measured | |",
        "|---|---|---|",
    ]
    for what, text, holds in found:
        lines.append(f"| {what} | {text} | {'holds' if holds else '**missed**'} |")
    lines += ["", "| | passes a step | µs a pass | least | all threads |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        cells = (row["name"], row["passes"], f"{row['thread']:.0f}")
        cells += (f"{row['least']:.0f}", f"{row['process']:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "*Timed* is with the clock read around every pass, as for `--pp-trace`, `--pp-profile` "
        "and the log line.",
        "",
        "## Making a schedule",
        "",
        "Milliseconds, best of three. Done once in a run for each number of microbatches, on "
        "every rank. PyTorch's constructors make and lower in one.",
        "",
        "| | p | m | make | lower | check |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in data["making"]:
        parts = ["" if row[k] is None else f"{row[k]:.1f}" for k in ("make", "lower", "check")]
        cells = (row["name"], row["pp"], row["microbatches"], *parts)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="of one executor before the next")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="8x64,16x128", help="p x m of the schedules made")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim is missed")
    add_arguments(parser)
    args = parser.parse_args()
    found = measured(args, args.pp, run_rank, ("pp", "microbatches", "steps", "rounds"))
    if found is None:
        return 1
    data, about = found
    data["making"] = making(args)
    about["megatron"] = version("megatron-core")
    save(args, "executor-overhead", data, about)
    (args.output / "executor_overhead.md").write_text(page(data, about))
    missed = [claim for claim in claims(data["rows"]) if not claim[2]]
    for what, text, _ in missed:
        print(f"missed: {what}: {text}")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
