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
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import add_arguments, measured, save
from benchmarks.rivals import SHAPE, Way, parallel_state, start, ways
from megatron_ext.integration import measuring
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.schedule import Costs, Placement, simulate

HERE = Path(__file__).resolve().parent

SCHEDULES = "1f1b,interleaved,gis,gis-h,po,zb-h1,zb-h2,interleaved-zb,v-min,v-half,v-zb,v-cap"
BASE = "stock 1f1b"
# Ours, and the schedule of PyTorch that has the same idea.
PAIRS = (
    ("ours 1f1b", "torch 1F1B"),
    ("ours interleaved", "torch Interleaved1F1B"),
    ("ours interleaved-zb", "torch InterleavedZeroBubble"),
    ("ours v-zb", "torch ZBVZeroBubble"),
)


@dataclass(frozen=True)
class Row:
    """One executor with one schedule.

    Attributes:
        name: whose, and which schedule.
        chunks: stages a rank.
        peak: largest of all ranks, in microbatches, by simulation.
        counted: the same, counted while it ran; None where the executor does not count.
        simulated: seconds of a step, without messages.
        step, least: seconds measured, median and minimum.
        times: all of them, round by round.
    """

    microbatches: int
    name: str
    chunks: int
    peak: float
    counted: float | None
    simulated: float
    step: float
    least: float
    times: list[float]

    @property
    def error(self) -> float:
        """Measured over simulated, less 1."""
        return self.step / self.simulated - 1


def measure(rank: int, args: argparse.Namespace, microbatches: int) -> list[Row]:
    """All executors in turn, round after round."""
    everything = ways(args.schedules.split(","), rank, args.pp, microbatches)
    logs, orders = {}, {}
    for way in everything:
        way.step()
        logs[way.name] = list(way.log)
        orders[way.name] = way.order(measuring.gather(logs[way.name]))
    seconds = args.unit_ms / 1e3
    times: dict[str, list[float]] = {way.name: [] for way in everything}
    for _ in range(args.repeats):
        for way in everything:
            way.take(seconds, seconds, seconds)
            dist.barrier()
            started = time.perf_counter()
            way.step()
            took = time.perf_counter() - started
            times[way.name].append(max(measuring.gather(took)))
            require_same(way, logs[way.name])
    rows = []
    for way in everything:
        run = simulate(orders[way.name], Costs.of(1, 1, 1))
        counted = measuring.gather(way.peak_sets)
        rows.append(
            Row(
                microbatches,
                way.name,
                way.placement.chunks,
                float(max(run.peak_activation)),
                None if None in counted else max(counted) / way.placement.chunks,
                float(run.makespan) * seconds,
                statistics.median(times[way.name]),
                min(times[way.name]),
                times[way.name],
            )
        )
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
    computed = max(measuring.gather(way.losses), key=len)
    close = [abs(a / b - 1) < 1e-4 for a, b in zip(computed, expected)]
    if len(close) != way.microbatches or not all(close):
        raise RuntimeError(f"{way.name}: losses {computed}, expected {expected}")


def machine(args: argparse.Namespace) -> dict[str, float]:
    """What sleeping and sending cost here, with all ranks at it."""
    seconds = args.unit_ms / 2e3
    late = []
    dist.barrier()
    for _ in range(10):
        started = time.perf_counter()
        time.sleep(seconds)
        late.append(time.perf_counter() - started - seconds)
    group = parallel_state.get_pipeline_model_parallel_group()
    cpu = torch.device("cpu")
    edges = connected(group, "passes", Placement.loop(group.size()).edges, cpu)
    channel = Channel(edges, SHAPE, torch.float32, cpu)
    hop = measuring.hop_seconds(channel, group)
    late_ms = 1e3 * max(measuring.gather(statistics.median(late)))
    return {"sleep_late_ms": late_ms, "hop_ms": 1e3 * max(measuring.gather(hop))}


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """All sizes on one rank; rank 0 writes what came out."""
    start(rank, args.pp, folder)
    rows, loads = [], []
    around = machine(args)
    for microbatches in map(int, args.microbatches.split(",")):
        rows += measure(rank, args, microbatches)
        loads.append(os.getloadavg()[1])
        if rank == 0:
            for row in rows:
                if row.microbatches == microbatches:
                    print(f"m={microbatches} {row.name}: {row.step:.3f} s, {row.error:+.2%}")
            sys.stdout.flush()
    if rank == 0:
        rounded = {key: round(value, 3) for key, value in around.items()}
        data = {
            "rows": [{**asdict(row), "error": row.error} for row in rows],
            "around": {**rounded, "load_5min": [round(load, 1) for load in loads]},
        }
        (folder / "rows.json").write_text(json.dumps(data))
    dist.barrier()


def claims(rows: list[dict[str, Any]], microbatches: int, pp: int) -> list[tuple[str, str, bool]]:
    """What was to be shown for one size: (what, measured, whether it holds).

    Throughputs are promised for m = 2p: bubbles shrink with m.
    """
    here = {row["name"]: row for row in rows if row["microbatches"] == microbatches}
    ours = {name: row for name, row in here.items() if name.startswith("ours ")}
    torches = {name: row for name, row in here.items() if name.startswith("torch ")}
    found = []
    if ours:
        worst = max(ours.values(), key=_distance)
        found.append(
            (
                "every schedule of ours within 3 % of its simulation",
                f"furthest: {worst['name']}, {worst['error']:+.2%}",
                _distance(worst) <= 0.03,
            )
        )
    if ours and torches:
        theirs = max(torches.values(), key=_distance)
        found.append(
            (
                "none of ours further from its simulation than PyTorch's furthest",
                f"{worst['name']} {worst['error']:+.2%}, {theirs['name']} {theirs['error']:+.2%}",
                _distance(worst) <= _distance(theirs),
            )
        )
    for mine, theirs_name in PAIRS:
        if mine in here and theirs_name in here:
            a, b = here[mine], here[theirs_name]
            found.append(
                (
                    f"{mine} no further from its simulation than {theirs_name}",
                    f"{a['error']:+.2%} against {b['error']:+.2%}",
                    _distance(a) <= _distance(b),
                )
            )
    if len(ours) > 1:
        found.append(_ratios(list(ours.values())))
    for name, least, most in (("ours v-zb", 1.15, 1.0), ("ours v-half", 1.1, 0.75)):
        if name in here and BASE in here and microbatches == 2 * pp:
            ratio, said = _throughput(here[BASE], here[name])
            memory = here[name]["peak"] / here[BASE]["peak"]
            counted = here[name]["counted"]
            found.append(
                (
                    f"{name} at least {least} times the throughput of {BASE}, at {most:.0%} of "
                    "its memory",
                    f"{ratio:.3f} (simulated {said:.3f}), peak {counted:g} microbatches counted, "
                    f"{memory:.0%} of {BASE}'s",
                    ratio >= least and memory <= most and counted == here[name]["peak"],
                )
            )
    return found


def _distance(row: dict[str, Any]) -> float:
    return abs(float(row["error"]))


def _throughput(base: dict[str, Any], row: dict[str, Any]) -> tuple[float, float]:
    """Of ``row`` over that of ``base``: median of the rounds' ratios, and simulated."""
    ratio = statistics.median(a / b for a, b in zip(base["times"], row["times"]))
    return ratio, base["simulated"] / row["simulated"]


def _ratios(ours: list[dict[str, Any]]) -> tuple[str, str, bool]:
    """Of step times, over all pairs."""
    worst, where = 0.0, ""
    for a, b in permutations(ours, 2):
        found, said = _throughput(a, b)
        if abs(found - said) > worst:
            worst = abs(found - said)
            where = f"{a['name']} over {b['name']}: {found:.3f}, simulated {said:.3f}"
    what = "ratios of step times between schedules of ours within 2 points of simulated"
    return what, f"furthest: {where}", worst <= 0.02


def page(data: dict[str, Any], about: dict[str, Any]) -> str:
    """The results in Markdown."""
    rows, around = data["rows"], data["around"]
    loads = ", ".join(map(str, around["load_5min"]))
    lines = [
        "# Executors with emulated costs",
        "",
        f"`python -m benchmarks.emulated_pipeline`, {about['date']}: {about['pp']} gloo ranks in "
        f"one process group, F = B = W = {about['unit_ms']:g} ms of a rank's share of a "
        f"microbatch (a pass of one of two chunks half of it), {about['repeats']} alternating "
        f"rounds after one without pauses; Python {about['python']}, torch {about['torch']}, "
        f"megatron-core {about['megatron']}, {about['machine']}; ranks at {about['priority']}, "
        f"load {about['load']} (5-minute load at the end of each size: {loads}). With all ranks "
        f"at it a sleep ends {around['sleep_late_ms']:.2f} ms late and a message takes "
        f"{around['hop_ms']:.2f} ms.",
        "",
        "*Simulated* has neither of these: passes of exactly that length, messages that take no "
        "time. *Error* is the median step over it. *Throughput* is against `stock 1f1b` in the "
        "same rounds. *Peak* is the worst rank's activation in microbatches, simulated; our "
        "executor's own count was equal, where the table does not say otherwise. All steps "
        "computed the same losses.",
        "",
        "The model multiplies and sleeps; no GPU, no kernel, no contention for a link is in here.",
    ]
    for m in dict.fromkeys(row["microbatches"] for row in rows):
        found = claims(rows, m, about["pp"])
        lines += ["", f"## m = {m}: {sum(c[2] for c in found)} of {len(found)} hold", ""]
        lines += ["| to be shown | measured | |", "|---|---|---|"]
        for what, result, holds in found:
            lines.append(f"| {what} | {result} | {'holds' if holds else '**missed**'} |")
        lines += ["", *_table([row for row in rows if row["microbatches"] == m])]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    base = next((row for row in rows if row["name"] == BASE), None)
    lines = [
        "| executor and schedule | v | peak | simulated s | median s | least s | error | "
        "throughput (simulated) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        peak = f"{row['peak']:g}"
        if row["counted"] not in (None, row["peak"]):
            peak += f" (counted {row['counted']:g})"
        ratio = "" if base is None else "{:.3f} ({:.3f})".format(*_throughput(base, row))
        cells = (row["name"], f"{row['chunks']}", peak, f"{row['simulated']:.3f}")
        cells += (f"{row['step']:.3f}", f"{row['least']:.3f}", f"{row['error']:+.2%}", ratio)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--schedules", default=SCHEDULES, help="ours, comma-separated")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", default="8,16", help="comma-separated")
    parser.add_argument("--unit-ms", type=float, default=150.0, help="F, B, W of a rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim is missed")
    add_arguments(parser)
    args = parser.parse_args()
    names = ("pp", "microbatches", "unit_ms", "repeats")
    found = measured(args, args.pp, run_rank, names)
    if found is None:
        return 1
    data, about = found
    about["megatron"] = version("megatron-core")
    save(args, "emulated-pipeline", data, about)
    (args.output / "emulated_pipeline.md").write_text(page(data, about))
    missed = []
    for m in map(int, args.microbatches.split(",")):
        missed += [(m, *claim) for claim in claims(data["rows"], m, args.pp) if not claim[2]]
    for m, what, result, _ in missed:
        print(f"missed, m = {m}: {what}: {result}")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
