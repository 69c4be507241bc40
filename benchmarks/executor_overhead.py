#!/usr/bin/env python3
"""What the executor itself costs the CPU, per pass, beside Megatron's functions and PyTorch's.

    python -m benchmarks.executor_overhead [--pp 4] [--microbatches 16] [--steps 10] [--rounds 9]
        [--check] [--output DIR] [--date YYYY-MM-DD]

The emulated model of ``rivals.py`` without its pauses, on gloo ranks of this machine, executors in
turn in one process group. Counted is the CPU time of a rank's main thread (and of all its threads)
over a step, per pass: waiting costs nothing, so the ranks may share two cores. A pass is F, B, W
or BW; what the model alone takes is measured too. Also: what the watchdog and the recorded
timeline add. Writes
results/DATE-executor-overhead.json and executor_overhead.md; ``--check`` exits with 1 if ours
takes more than stock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import page as pages
from benchmarks import rivals
from benchmarks.emulated import dist, ranks, report_progress
from benchmarks.page import Claim, Row, alternating
from benchmarks.rivals import MegatronWay, Ours, Stage, Torch, Way, parallel_state, stock
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.pipeline import ScheduledPipeline
from megatron_ext.integration.plans import Plans
from megatron_ext.integration.utils import gather
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import generate

OURS = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "v-half", "v-zb")
# Ours inside Megatron, called with the same model and functions as stock.
INSIDE = {
    "ours in Megatron 1f1b": "stock 1f1b",
    "ours in Megatron interleaved": "stock interleaved",
}


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


def inside(name: str, chunks: int, rank: int, args: argparse.Namespace) -> MegatronWay:
    """Our forward-backward function as Megatron's training loop would call it."""
    pp, m = args.pp, args.microbatches
    choice = ScheduleRequest.of(name).resolve(pp, chunks, m)
    plans = Plans(lambda count: choice, choice.placement)
    pipeline = ScheduledPipeline(plans, WeightGradStore(), 300.0)
    return MegatronWay(f"ours in Megatron {name}", pipeline, rank, choice.placement, m)


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


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All executors on one rank.

    A row has ``passes`` (F, B, W and BW of a rank in one step) and microseconds of CPU per pass, of
    the busiest rank: of the main thread, median ``thread`` and ``least`` of the rounds, and
    ``process``, of all threads, median.
    """
    parallel_state.initialize_model_parallel(1, args.pp, create_gloo_process_groups=False)
    ways = everything(rank, args)
    passes = {}
    for way in ways:
        way.step()
        # Not the log's length: PyTorch's whole backward passes are noted there in two halves.
        passes[way.name] = len(way.order(gather(way.log)).ranks[rank])

    def spent(way: Way) -> tuple[float, float]:
        dist.barrier()
        thread, process = time.thread_time(), time.process_time()
        for _ in range(args.steps):
            way.step()
        thread, process = time.thread_time() - thread, time.process_time() - process
        each = 1e6 / args.steps / passes[way.name]
        return thread * each, process * each

    steps: dict[str, Any] = {way.name: functools.partial(spent, way) for way in ways}
    steps[""] = functools.partial(model_alone, args.microbatches * args.steps)
    taken = alternating(steps, args.rounds)
    model = statistics.median(taken.pop(""))
    rows = []
    for name, found in taken.items():
        threads, processes = zip(*found)
        mine = (statistics.median(threads), min(threads), statistics.median(processes))
        busiest = zip(("thread", "least", "process"), max(gather(mine)))
        rows.append({"name": name, "passes": passes[name], **dict(busiest)})
        report_progress(rows[-1])
    return {"rows": rows, "model": model}


def model_alone(microbatches: int) -> float:
    """Microseconds of a pass of the model without an executor: F and BW, one after the other."""
    stage = Stage(1, 3, None, [])
    xs = [x.requires_grad_(True) for x in rivals.batch(microbatches)]
    grad = rivals.torch.ones(rivals.SHAPE)
    started = time.thread_time()
    for x in xs:
        rivals.torch.autograd.backward(stage(x), grad)
    return (time.thread_time() - started) * 1e6 / (2 * microbatches)


def claims(data: Row) -> list[Claim]:
    """Ours against stock, for the same passes."""
    here = {row["name"]: row for row in data["rows"]}
    found = []
    for mine, theirs in INSIDE.items():
        a, b = here[mine], here[theirs]
        what = f"{mine} takes no more CPU a pass than {theirs}"
        text = f"{a['thread']:.0f} against {b['thread']:.0f} µs"
        found.append(Claim(what, text, a["passes"] == b["passes"] and a["thread"] <= b["thread"]))
    return found


def body(data: Row) -> list[Any]:
    """The page."""

    busiest = {
        "": "{name}",
        "passes a step": "{passes}",
        "µs a pass": "{thread:.0f}",
        "least": "{least:.0f}",
        "all threads": "{process:.0f}",
    }
    return [
        "Microseconds of CPU time per pass (F, B, W or BW) on the busiest rank, without any "
        "compute to speak of: the main thread's, which is what a GPU's kernels are launched from, "
        "and that of all threads (gloo's, the watchdog's). A split pass does less each than a "
        f"whole one. The model alone takes {data['model']:.0f} µs a pass. *In Megatron* is our "
        "forward-backward function with stock's arguments, model and `forward_step`; the other "
        "rows of ours are the executor over plain autograd, as PyTorch's are. The machine's "
        "speed differs from run to run, by a quarter where others share it: compare rows of one.",
        pages.verdicts(claims(data)),
        pages.table(busiest, data["rows"]),
        "*Timed* is with the clock read around every pass, as for `--pp-trace` and the log line.",
    ]


BENCHMARK = pages.Benchmark(
    "executor-overhead",
    __doc__,
    "What the executor costs",
    lambda data: (
        f"{data['pp']} gloo ranks in one process group, {data['microbatches']} microbatches, "
        f"median of {data['rounds']} alternating rounds of {data['steps']} steps"
    ),
    body,
    lambda args: ranks(args.pp, functools.partial(run_rank, args)),
    {
        "pp": 4,
        "microbatches": 16,
        "steps": (10, "of one executor before the next"),
        "rounds": 9,
    },
    ("torch", "megatron-core"),
    claims,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
