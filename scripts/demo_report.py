#!/usr/bin/env python3
"""What demo.sh shows: progress while it trains, and the comparison at the end."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from . import run_log

OURS, EVERY = "[megatron_ext]", 10
# The demo's promise: the model learns, and does so under both schedules.
START_NATS, END_NATS = 5.0, 3.5


def progress(options: argparse.Namespace) -> int:
    """Copy stdin to a log; a line for the first, every tenth and the last training step, our own
    lines, and the log's end on failure."""
    start = time.monotonic()
    text, seen = "", 0
    with open(options.log, "w") as log:
        for line in sys.stdin:
            log.write(line)
            if line.startswith(OURS) and "--device cpu" not in line:
                print(f"   {options.name:>8} {line.removeprefix(OURS).strip()}", flush=True)
            text += line
            for step, steps, values in run_log.steps(text):
                if step > seen and "lm loss" in values:
                    seen, text = step, ""
                    if seen % EVERY and seen not in (1, steps):
                        continue
                    loss, seconds = float(values["lm loss"]), time.monotonic() - start
                    print(
                        f"   {options.name:>8} step {step:>3}/{steps}  loss {loss:.4f}"
                        f"  ({seconds:.0f} s)",
                        flush=True,
                    )
            text = text[-2000:]
    if seen == 0:
        tail = Path(options.log).read_text()[-3000:]
        print(f"{tail}\nerror: this run made no step; its log is {options.log}", file=sys.stderr)
        return 1
    return 0


def weights_differ(one: Path, other: Path) -> tuple[int, list[str]]:
    """(number of tensors, names of those whose bits differ) of two checkpoints."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    # One process is enough to read a checkpoint, and is meant.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def load(folder: Path) -> dict[str, Any]:
        newest = max(p for p in folder.iterdir() if p.name.startswith("iter_"))
        metadata = dcp.FileSystemReader(newest).read_metadata()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "size") and hasattr(entry, "properties")
        }
        dcp.load(tensors, checkpoint_id=newest, no_dist=True)
        return tensors

    first, second = load(one), load(other)
    names = sorted(set(first) | set(second))
    differ = [
        name
        for name in names
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    ]
    return len(names), differ


def each(values: Sequence[Fraction]) -> str:
    """One number a rank."""
    return " ".join(f"{float(value):g}" for value in values)


def compare(options: argparse.Namespace) -> int:
    """The table; exit status 0 only if everything that the demo promises is so."""
    from megatron_ext.schedule import generate, simulate

    out = Path(options.output)
    stock, ours = (run_log.lm_losses(out / f"{name}.jsonl") for name in ("stock", "ours"))
    name, m, pp = options.schedule, options.microbatches, options.pp
    print(f"{'step':>6}  {'stock 1f1b':>20}  {name:>20}")
    shown = sorted(set(range(1, options.steps + 1, max(1, options.steps // 12))) | {options.steps})
    for step in shown:
        one, other = stock.get(step, math.nan), ours.get(step, math.nan)
        verdict = "equal" if one == other else "DIFFERENT"
        print(f"{step:>6}  {one:>20.8f}  {other:>20.8f}  {verdict}")

    good = True

    def claim(holds: bool, text: str) -> None:
        nonlocal good
        good = good and holds
        print(f"  {'yes' if holds else 'NO':<4} {text}")

    print()
    claim(
        len(stock) == options.steps and stock == ours,
        f"losses of all {options.steps} steps equal bit for bit",
    )
    total, differ = weights_differ(out / "stock", out / "ours")
    claim(total > 0 and not differ, f"all {total} trained weight tensors equal bit for bit")
    first, last = stock.get(1, math.nan), stock.get(options.steps, math.nan)
    claim(
        first > START_NATS and last < END_NATS,
        f"loss falls from {first:.2f} to {last:.2f} nats a byte (below {END_NATS})",
    )
    plans = {n: simulate(generate(n, pp, m)) for n in ("1f1b", name)}
    chunks = plans[name].schedule.chunks
    measured = [Fraction(count, chunks) for count in run_log.peak_sets(out / "trace")]
    planned = plans[name].peak_activation
    claim(
        measured == planned,
        f"peak activations a rank, in microbatches: measured {each(measured)}, simulated "
        f"{each(planned)}",
    )
    print(f"\n  {'simulated, F=B=W':<18} {'bubble':>8}   peak activations a rank, in microbatches")
    for n, plan in plans.items():
        print(f"  {n:<18} {float(100 * plan.bubble):>6.1f} %   {each(plan.peak_activation)}")
    print(f"\n  timeline: {out / 'timeline.svg'}\n  logs and traces: {out}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores and cores < pp:
        print(
            f"\n  {pp} ranks share {cores} cores: they wait for each other's cores, so the "
            "timeline\n  shows longer waits than the plan. The order and the memory are real, the "
            "times are not."
        )
    return 0 if good else 1


def main() -> int:
    """Dispatch."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("progress")
    sub.add_argument("--name", required=True)
    sub.add_argument("--log", required=True)
    sub.set_defaults(run=progress)
    sub = commands.add_parser("compare")
    sub.add_argument("--output", required=True)
    sub.add_argument("--schedule", required=True)
    sub.add_argument("--pp", type=int, required=True)
    sub.add_argument("--microbatches", type=int, required=True)
    sub.add_argument("--steps", type=int, required=True)
    sub.set_defaults(run=compare)
    options = parser.parse_args()
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
