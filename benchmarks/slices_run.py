#!/usr/bin/env python3
"""A training that changes its number of slices at every checkpoint, beside one of whole sequences.

    python -m benchmarks.slices_run [--cuts 1,2,4,8,3] [--steps 60] [--schedule v-half]
        [--unit-ms 150] [--rounds 3] [--output DIR] [--date YYYY-MM-DD]

Trains a small GPT with ``pretrain_gpt.py`` of a stock checkout (``$MEGATRON_LM`` or the user cache)
on four gloo ranks of this machine, in float32. One run is stock's 1F1B. The other one saves a
checkpoint every ``--steps`` steps and continues from it with another ``--pp-slices``. Then the
executor runs orders of whole microbatches and of slices whose passes sleep: F, B and W of a rank's
share of a microbatch ``--unit-ms`` each, a slice its part of it; whole and sliced steps in turn,
``--rounds`` times. Writes results/DATE-slices-run.json and slices_run.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row, alternating, ratio
from megatron_ext.prove.server import ScriptServer
from megatron_ext.schedule import generate, lower, simulate

TAG = "core_v0.19.0"
MODEL = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --position-embedding-type rope --swiglu --normalization RMSNorm
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1
--global-batch-size 4 --lr 1e-3 --lr-decay-style constant --split 90,5,5 --eval-iters 0
--eval-interval 10000 --log-interval 1 --attention-dropout 0 --hidden-dropout 0 --clip-grad 1.0
--untie-embeddings-and-output-weights --ckpt-format torch_dist --transformer-impl local
--dist-ckpt-optim-fully-reshardable --pipeline-model-parallel-size 4"""
RANKS = 4
SHOWN = 12  # rows of the table
MICROBATCHES, SLICES = 4, 4  # of the emulated steps
NAMES = ("1f1b", "interleaved", "zb-h1", "v-min", "v-half", "v-zb")


def trained(server: ScriptServer, folder: Path, *flags: str) -> list[float]:
    """Losses of a run."""
    outcome = server.run([*MODEL.split(), *flags], RANKS, folder, 1200.0)
    if outcome.status != "ok":
        raise SystemExit(f"{' '.join(flags)}\n{outcome.report}")
    return [float.fromhex(line["losses"]["lm loss"]) for line in outcome.losses()]


def measure(args: argparse.Namespace) -> Row:
    """Losses of every step of both runs, and the slices that the second one had."""
    cuts = [int(n) for n in args.cuts.split(",")]
    last = args.steps * len(cuts)
    cache = Path.home() / ".cache" / "megatron-ext" / "Megatron-LM" / TAG
    root = Path(os.environ.get("MEGATRON_LM") or cache)
    with (
        tempfile.TemporaryDirectory() as temporary,
        ScriptServer(root / "pretrain_gpt.py") as server,
    ):
        folder = Path(temporary)
        every = ("--train-iters", str(last), "--save-interval", str(args.steps))
        first, saved, sliced = folder / "first", folder / "saved", list[float]()
        # A V draws its first weights in another order than stock, so both begin with these.
        trained(server, folder / "log", *every, "--save", str(first), "--exit-interval", "1")
        whole = trained(server, folder / "log", *every, "--load", str(first))
        for place, count in enumerate(cuts):
            ours = ["--pp-schedule", args.schedule, "--pp-slices", str(count)]
            ours += ["--load", str(saved if place else first), "--save", str(saved)]
            end = str((place + 1) * args.steps)
            sliced += trained(server, folder / "log", *every, *ours, "--exit-interval", end)
    from benchmarks.emulated import ranks

    rows = ranks(RANKS, lambda rank: emulated(args))
    return {"megatron": TAG, "whole": whole, "sliced": sliced, "emulated": rows}


def emulated(args: argparse.Namespace) -> list[Row]:
    """Seconds of steps whose passes sleep, on one of the ranks."""
    from benchmarks.emulated import SleepingStages, execute, timed
    from megatron_ext.runtime.watchdog import Watchdog

    watchdog, unit = Watchdog("benchmark", 300.0), args.unit_ms / 1e3
    plans = {
        (name, count): lower(generate(name, RANKS, MICROBATCHES, slices=count))
        for name in NAMES
        for count in (1, SLICES)
    }

    def step(plan: Any, count: int) -> None:
        each = unit / plan.chunks / count
        execute(plan, SleepingStages(plan, (8,), lambda op, stage: each), (8,), watchdog)

    steps: dict[tuple[str, int], Any] = {
        key: functools.partial(timed, functools.partial(step, plan, key[1]))
        for key, plan in plans.items()
    }
    times = alternating(steps, args.rounds)
    return [
        {
            "schedule": name,
            "slices": count,
            "simulated": float(simulate(plan).makespan) * unit,
            "step": statistics.median(times[name, count]),
            "faster": ratio(times[name, 1], times[name, count]),
            "peak": float(max(plan.peak_activation())),
        }
        for (name, count), plan in plans.items()
    ]


def body(data: Row) -> list[Any]:
    """The page."""
    cuts = [int(n) for n in data["cuts"].split(",")]
    first = 2  # of the losses: what came before is in the checkpoint that both begin with
    apart = [abs(b / a - 1) for a, b in zip(data["whole"], data["sliced"])]
    rows = [
        {
            "step": at,
            "slices": cuts[(at - 1) // data["steps"]],
            "loss, whole sequences": f"{data['whole'][at - first]:.6f}",
            "loss, slices": f"{data['sliced'][at - first]:.6f}",
            "relative difference": f"{apart[at - first]:.1e}",
        }
        for at in _shown(first, len(apart) + 1)
    ]
    columns: pages.Columns = {
        "schedule": "`{schedule}`",
        "slices": "{slices}",
        "peak": "{peak:g}",
        "simulated s": "{simulated:.3f}",
        "median s": "{step:.3f}",
        "error": lambda row: f"{row['step'] / row['simulated'] - 1:+.1%}",
        "faster": "{faster:.3f}",
    }
    return [
        f"Of {len(apart)} steps the losses differ by {max(apart):.1e} at most, in step "
        f"{apart.index(max(apart)) + first}: sums over slices round differently, and training "
        "lets every difference grow.",
        pages.grid(list(rows[0]), [list(row.values()) for row in rows]),
        "## Step times, with passes that sleep",
        f"{RANKS} ranks, {MICROBATCHES} microbatches, F = B = W = {data['unit_ms']:g} ms of a "
        f"rank's share of a microbatch, {data['rounds']} rounds. *Simulated*: without messages. "
        "*Faster*: than the same schedule with whole microbatches. The simulation has no cost of "
        "short slices, and neither has a pass that sleeps.",
        pages.table(columns, data["emulated"]),
    ]


def _shown(first: int, last: int) -> list[int]:
    """Numbers of steps, evenly over all; both ends too."""
    return sorted({first + (last - first) * at // (SHOWN - 1) for at in range(SHOWN)})


BENCHMARK = pages.Benchmark(
    "slices-run",
    __doc__,
    "A training that changes its slices",
    lambda data: (
        f"stock 1F1B, and `{data['schedule']}` that continues with {data['cuts']} slices, each "
        f"for {data['steps']} steps from a checkpoint of the one before; float32, {RANKS} gloo "
        "ranks"
    ),
    body,
    measure,
    {
        "cuts": ("1,2,4,8,3", "slices, in turn"),
        "steps": (60, "with each"),
        "schedule": "v-half",
        "unit_ms": (150.0, "F, B, W of a rank's share of a microbatch"),
        "rounds": 3,
    },
    ("torch",),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
