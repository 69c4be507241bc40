#!/usr/bin/env python3
"""Real execution with emulated costs: step times beside the simulated ones, rivals in the same run.

    python -m benchmarks.emulated_pipeline [--pp 4] [--microbatches 8,16] [--unit-ms 150]
        [--repeats 5] [--schedules v-zb,...] [--check] [--output DIR] [--date YYYY-MM-DD]

Runs our executor under each schedule, Megatron's stock 1F1B and interleaved functions and
PyTorch's schedules (``rivals.py``) on gloo ranks of this machine, in turn, in one process group.
Messages, autograd and bookkeeping are real; a pass also sleeps, so that two cores are enough for
many ranks: F, B and W of a rank's share of a microbatch take ``--unit-ms`` each, those of one of v
chunks 1/v of it. Each executor runs once without pauses first: its order is taken there, must be
what its list says, and is simulated; all must compute the same losses in every step. Writes
results/DATE-emulated-pipeline.json and emulated_pipeline.md; ``--check`` exits with 1 on a miss.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from benchmarks import page as pages
from benchmarks.emulated import BESIDE, CPU, beside, ranks, report_progress, timed
from benchmarks.page import Claim, Row, alternating, ratio
from benchmarks.rivals import SHAPE, Way, parallel_state, torch, ways
from megatron_ext.integration import measuring
from megatron_ext.integration.utils import gather
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.schedule import Costs, Placement, simulate

SCHEDULES = "1f1b,interleaved,gis,gis-h,po,zb-h1,zb-h2,interleaved-zb,v-min,v-half,v-zb,v-cap"
BASE = "stock 1f1b"
# Ours, and the schedule of PyTorch that has the same idea.
PAIRS = (
    ("ours 1f1b", "torch 1F1B"),
    ("ours interleaved", "torch Interleaved1F1B"),
    ("ours interleaved-zb", "torch InterleavedZeroBubble"),
    ("ours v-zb", "torch ZBVZeroBubble"),
)


def measure(rank: int, args: argparse.Namespace, microbatches: int) -> list[Row]:
    """All executors in turn, round after round.

    A row has ``name`` (whose, and which schedule), ``chunks`` (stages a rank), ``peak`` (largest of
    all ranks, in microbatches, by simulation), ``counted`` (the same, counted while it ran; None
    where the executor does not count), ``simulated`` (seconds of a step, without messages), the
    measured ``times`` round by round, their median ``step`` and ``least``, and ``error`` (measured
    over simulated, less 1).
    """
    everything = ways(args.schedules.split(","), rank, args.pp, microbatches)
    seconds = args.unit_ms / 1e3
    logs, orders = {}, {}
    for way in everything:
        way.step()
        logs[way.name] = list(way.log)
        orders[way.name] = way.order(gather(logs[way.name]))
        way.take(seconds, seconds, seconds)

    def step(way: Way) -> float:
        took = timed(way.step)
        require_same(way, logs[way.name])
        return took

    steps = {way.name: functools.partial(step, way) for way in everything}
    times = alternating(steps, args.repeats, warm=0)
    rows = []
    for way in everything:
        run = simulate(orders[way.name], Costs.of(1, 1, 1))
        counted, took = gather(way.peak_sets), times[way.name]
        rows.append(
            {
                "microbatches": microbatches,
                "name": way.name,
                "chunks": way.placement.chunks,
                "peak": float(max(run.peak_activation)),
                "counted": None if None in counted else max(counted) / way.placement.chunks,
                "least": min(took),
                **beside(took, float(run.makespan) * seconds),
            }
        )
        report_progress("m={microbatches} {name}: {step:.3f} s, {error:+.2%}".format(**rows[-1]))
    return rows


def require_same(way: Way, log: list[Any]) -> None:
    """The step did what it did before, and computed what the model is: a product of numbers.

    Raises:
        RuntimeError: it did not.
    """
    if way.log != log:
        raise RuntimeError(f"{way.name}: rank {way.rank} did other passes than in its first step")
    factor = 1.0
    for number in range(way.placement.num_stages):
        factor *= 1.0 + number / 64
    size = SHAPE[0] * SHAPE[1] * SHAPE[2]
    expected = [size * factor * (1.0 + number) for number in range(way.microbatches)]
    computed = max(gather(way.losses), key=len)
    close = [abs(a / b - 1) < 1e-4 for a, b in zip(computed, expected)]
    if len(close) != way.microbatches or not all(close):
        raise RuntimeError(f"{way.name}: losses {computed}, expected {expected}")


def machine(args: argparse.Namespace) -> dict[str, float]:
    """What sleeping and sending cost here, with all ranks at it."""
    seconds = args.unit_ms / 2e3
    late = [timed(lambda: time.sleep(seconds)) - seconds for _ in range(10)]
    group = parallel_state.get_pipeline_model_parallel_group()
    edges = connected(group, "passes", Placement.loop(group.size()).edges, CPU)
    hop = measuring.hop_seconds(Channel(edges, SHAPE, torch.float32, CPU), group)
    found = {"sleep_late_ms": statistics.median(late), "hop_ms": max(gather(hop))}
    return {key: round(1e3 * value, 3) for key, value in found.items()}


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All sizes on one rank."""
    parallel_state.initialize_model_parallel(1, args.pp, create_gloo_process_groups=False)
    around: Row = {**machine(args), "load_5min": []}
    rows = []
    for microbatches in map(int, args.microbatches.split(",")):
        rows += measure(rank, args, microbatches)
        around["load_5min"].append(round(os.getloadavg()[1], 1))
    return {"rows": rows, "around": around}


def claims(data: Row) -> list[Claim]:
    """What was to be shown, by size."""
    sizes = dict.fromkeys(row["microbatches"] for row in data["rows"])
    return [claim for m in sizes for claim in _claims(data["rows"], m, data["pp"])]


def _claims(rows: Sequence[Row], microbatches: int, pp: int) -> list[Claim]:
    """Throughputs are promised for m = 2p: bubbles shrink with m."""
    here = {row["name"]: row for row in rows if row["microbatches"] == microbatches}
    ours = [row for name, row in here.items() if name.startswith("ours ")]
    torches = [row for name, row in here.items() if name.startswith("torch ")]
    found = []

    def claim(what: str, measured: str, holds: bool) -> None:
        found.append(Claim(what, measured, holds, group=f"m = {microbatches}"))

    def off(row: Row) -> float:
        return abs(float(row["error"]))

    if ours:
        worst = max(ours, key=off)
        text = f"furthest: {worst['name']}, {worst['error']:+.2%}"
        claim("every schedule of ours within 3 % of its simulation", text, off(worst) <= 0.03)
    if ours and torches:
        theirs = max(torches, key=off)
        text = f"{worst['name']} {worst['error']:+.2%}, {theirs['name']} {theirs['error']:+.2%}"
        what = "none of ours further from its simulation than PyTorch's furthest"
        claim(what, text, off(worst) <= off(theirs))
    for mine, other in PAIRS:
        if mine in here and other in here:
            a, b = here[mine], here[other]
            what = f"{mine} no further from its simulation than {other}"
            claim(what, f"{a['error']:+.2%} against {b['error']:+.2%}", off(a) <= off(b))
    if len(ours) > 1:
        away, text = _ratios(ours)
        what = "ratios of step times between schedules of ours within 2 points of simulated"
        claim(what, f"furthest: {text}", away <= 0.02)
    for name, least, most in (("ours v-zb", 1.15, 1.0), ("ours v-half", 1.1, 0.75)):
        if name in here and BASE in here and microbatches == 2 * pp:
            faster, said = _throughput(here[BASE], here[name])
            memory = here[name]["peak"] / here[BASE]["peak"]
            counted = here[name]["counted"]
            claim(
                f"{name} at least {least} times the throughput of {BASE}, at {most:.0%} of its "
                "memory",
                f"{faster:.3f} (simulated {said:.3f}), peak {counted:g} microbatches counted, "
                f"{memory:.0%} of {BASE}'s",
                faster >= least and memory <= most and counted == here[name]["peak"],
            )
    return found


def _throughput(base: Row, row: Row) -> tuple[float, float]:
    """Of ``row`` over that of ``base``: median of the rounds' ratios, and simulated."""
    return ratio(base["times"], row["times"]), base["simulated"] / row["simulated"]


def _ratios(ours: Sequence[Row]) -> tuple[float, str]:
    """The ratio of step times, of all pairs, that is furthest from the simulated one."""
    worst, where = 0.0, ""
    for a, b in permutations(ours, 2):
        found, said = _throughput(a, b)
        if abs(found - said) > worst:
            worst = abs(found - said)
            where = f"{a['name']} over {b['name']}: {found:.3f}, simulated {said:.3f}"
    return worst, where


def what(data: Row) -> str:
    """What was run."""
    loads = ", ".join(map(str, data["around"]["load_5min"]))
    return (
        f"{data['pp']} gloo ranks in one process group, F = B = W = {data['unit_ms']:g} ms of "
        "a rank's share of a microbatch (a pass of one of two chunks half of it), "
        f"{data['repeats']} alternating rounds after one without pauses, 5-minute load at the "
        f"end of each size {loads}"
    )


def body(data: Row) -> list[Any]:
    """The page."""
    around = data["around"]
    parts: list[Any] = [
        f"With all ranks at it a sleep ends {around['sleep_late_ms']:.2f} ms late and a message "
        f"takes {around['hop_ms']:.2f} ms. *Simulated* has neither of these: passes of exactly "
        "that length, messages that take no time. *Error* is the median step over it. "
        "*Throughput* is against `stock 1f1b` in the same rounds. *Peak* is the worst rank's "
        "activation in microbatches, simulated; our executor's own count was equal, where the "
        "table does not say otherwise. All steps computed the same losses.",
        "The model multiplies and sleeps; no GPU, no kernel, no contention for a link is in here.",
    ]
    for m in dict.fromkeys(row["microbatches"] for row in data["rows"]):
        found = _claims(data["rows"], m, data["pp"])
        parts.append(f"## m = {m}: {sum(bool(c.holds) for c in found)} of {len(found)} hold")
        parts.append(pages.verdicts(found))
        parts.append(_table([row for row in data["rows"] if row["microbatches"] == m]))
    return parts


def _table(rows: Sequence[Row]) -> list[str]:
    base = next((row for row in rows if row["name"] == BASE), None)

    def peak(row: Row) -> str:
        other = row["counted"] not in (None, row["peak"])
        return f"{row['peak']:g}" + (f" (counted {row['counted']:g})" if other else "")

    def throughput(row: Row) -> str:
        return "" if base is None else "{:.3f} ({:.3f})".format(*_throughput(base, row))

    columns: pages.Columns = {
        "executor and schedule": "{name}",
        "v": "{chunks}",
        "peak": peak,
        "simulated s": BESIDE["simulated s"],
        "median s": BESIDE["median s"],
        "least s": "{least:.3f}",
        "error": BESIDE["error"],
        "throughput (simulated)": throughput,
    }
    return pages.table(columns, rows)


BENCHMARK = pages.Benchmark(
    "emulated-pipeline",
    __doc__,
    "Executors with emulated costs",
    what,
    body,
    lambda args: ranks(args.pp, functools.partial(run_rank, args)),
    {
        "schedules": (SCHEDULES, "ours, comma-separated"),
        "pp": 4,
        "microbatches": ("8,16", "comma-separated"),
        "unit_ms": (150.0, "F, B, W of a rank"),
        "repeats": 5,
    },
    ("torch", "megatron-core"),
    claims,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
