#!/usr/bin/env python3
"""Optimizer post-validation: what it gains, beside what the simulator says, and what it costs.

    python -m benchmarks.post_validation [--schedules v-zb,zb-h2] [--sizes 4x8,8x16]
        [--passes 100,100,100] [--iterations 16] [--rounds 3] [--output DIR] [--date YYYY-MM-DD]

Trains a tiny GPT with ``pretrain_gpt.py`` of a stock checkout (``$MEGATRON_LM`` or the user cache)
on gloo ranks of this machine. A pass of a microbatch takes ``--passes`` milliseconds of F, B and W
(a pause behind the real one, so two cores are enough for many ranks). With and without
``--pp-post-validation`` in turn, ``--rounds`` times, and one run with a gradient that has to be
clipped, so that a step is undone. Losses, parameters and optimizer states of all runs are compared
bit for bit. Writes results/DATE-post-validation.json and post_validation.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.prove.server import ScriptServer
from megatron_ext.schedule import lower, simulate
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import GENERATORS, generate
from megatron_ext.schedule.post_validation import add_post_validation, steady_time
from tests.support import ROOT

TAG = "core_v0.19.0"
MODEL = """--hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --mock-data
--tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --eval-iters 1 --eval-interval 1000
--log-interval 100 --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch_dist
--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --clip-grad 20
--rerun-mode disabled --no-check-for-nan-in-loss-and-grad"""
SETTLED = 3  # iterations at the begin that are not timed


class Trainer:
    """Runs one schedule after the other on forked ranks.

    Args:
        server: of the training script.
        args: of the command line.
        folder: for logs.
    """

    def __init__(self, server: ScriptServer, args: argparse.Namespace, folder: Path) -> None:
        self.server, self.args, self.folder = server, args, folder

    def run(
        self, name: str, pp: int, microbatches: int, ahead: bool, fault: int | None = None
    ) -> tuple[list[float], Any]:
        """Seconds of every settled iteration, and everything that was computed."""
        args = self.args
        chunks = 2 if GENERATORS[name].any_chunks else GENERATORS[name].default_chunks
        flags = f"{MODEL} --pipeline-model-parallel-size {pp} --pp-schedule {name}"
        flags += f" --num-layers {2 * pp} --global-batch-size {microbatches}"
        # Not the model's FLOPs: every stage takes as long.
        flags += f" --train-iters {args.iterations} --pp-cost {args.passes}"
        if GENERATORS[name].any_chunks:
            flags += f" --num-virtual-stages-per-pipeline-rank {chunks}"
        if ahead:
            flags += " --pp-post-validation 0"
        faults = [] if fault is None else [{"iteration": fault, "rank": pp - 1, "factor": 1e6}]
        pace = [float(ms) / chunks for ms in args.passes.split(",")]
        value = {"faults": faults, "pace": pace}
        probe = ROOT / "tests" / "support" / "rank_probe.py"
        outcome = self.server.run(
            flags.split(), pp, self.folder / "run", 600.0, prelude=probe, value=value
        )
        if outcome.status != "ok":
            raise SystemExit(f"{name} {outcome.status}:\n{outcome.report}")
        ranks = [
            [json.loads(line) for line in (outcome.folder / f"rank{r}.state").open()]
            for r in range(pp)
        ]
        # The last rank is the last to come to the end of an iteration's step.
        clock = [line[0] for line in ranks[-1]]
        seconds = [b - a for a, b in itertools.pairwise(clock)][SETTLED:]
        states = [[line[1:] for line in lines] for lines in ranks]
        losses = [entry["losses"] for entry in outcome.losses()]
        return seconds, (states, losses)

    def compare(self, name: str, pp: int, microbatches: int) -> Row:
        """With and without, in turn; and once with a step that has to be undone.

        ``usual`` and ``ahead`` are seconds of an iteration, medians over rounds of each run's
        median; ``gain`` the share that is saved, median of the rounds' ratios; ``simulated_...``
        what the simulator says; ``undone`` the iterations' time that an undone step costs, beside
        the same run without it; ``same`` whether all runs agree bit for bit.
        """
        args = self.args
        medians: dict[bool, list[float]] = {False: [], True: []}
        results = []
        for _ in range(args.rounds):
            for ahead, own in medians.items():
                seconds, result = self.run(name, pp, microbatches, ahead)
                # The last iteration is never followed by one that could begin before its end.
                own.append(statistics.median(seconds[:-1]))
                results.append(result)
        at = args.iterations // 2
        clipped = [self.run(name, pp, microbatches, ahead, at) for ahead in (False, True)]
        # Without clipping these would take a median each.
        lost = sum(clipped[1][0]) - statistics.median(clipped[1][0]) * len(clipped[1][0])
        same = all(r == results[0] for r in results) and clipped[0][1] == clipped[1][1]
        costs = Costs.parse(args.passes)
        simulated = [
            simulate(generate(name, pp, microbatches, costs=costs)).makespan,
            steady_time(
                add_post_validation(
                    lower(generate(name, pp, microbatches, costs=costs, objective="span"))
                )
            ),
        ]
        usual, ahead = (statistics.median(medians[key]) for key in (False, True))
        gains = [1 - b / a for a, b in zip(medians[False], medians[True])]
        return {
            "schedule": name,
            "pp": pp,
            "microbatches": microbatches,
            "usual": usual,
            "ahead": ahead,
            "simulated_usual": float(simulated[0]) / 1e3,
            "simulated_ahead": float(simulated[1]) / 1e3,
            "gain": statistics.median(gains),
            "simulated_gain": float(1 - simulated[1] / simulated[0]),
            "undone": lost / ahead,
            "same": same,
        }


def body(data: Row) -> list[Any]:
    """The page."""
    columns: pages.Columns = {
        "schedule": "{schedule}",
        "p": "{pp}",
        "m": "{microbatches}",
        "without, s": "{usual:.3f}",
        "without, simulated": "{simulated_usual:.3f}",
        "with, s": "{ahead:.3f}",
        "with, simulated": "{simulated_ahead:.3f}",
        "gain": "{gain:.2%}",
        "gain, simulated": "{simulated_gain:.2%}",
        "an undone step costs": "{undone:.2f} iterations",
        "bit for bit": lambda row: "yes" if row["same"] else "**no**",
    }
    return [
        pages.table(columns, data["rows"]),
        "Measured times hold what the simulated ones do not: the optimizer, Megatron's own work, "
        "and messages. An undone step costs what all iterations of a run with one "
        "undone step took, less as many median ones.",
    ]


def measure(args: argparse.Namespace) -> Row:
    """All sizes and schedules."""
    root = os.environ.get("MEGATRON_LM")
    cache = Path.home() / ".cache" / "megatron-ext" / "Megatron-LM" / TAG
    script = Path(root) if root else cache
    rows, load = [], [os.getloadavg()[0]]
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptServer(script / "pretrain_gpt.py", modules=["tests.support", "benchmarks"]) as server,
    ):
        trainer = Trainer(server, args, Path(folder))
        for size in args.sizes.split(","):
            pp, microbatches = map(int, size.split("x"))
            for name in args.schedules.split(","):
                rows.append(trainer.compare(name, pp, microbatches))
                print(rows[-1], flush=True)
                load.append(os.getloadavg()[0])
    return {"megatron": TAG, "load": f"{min(load):.1f} to {max(load):.1f}", "rows": rows}


BENCHMARK = pages.Benchmark(
    "post-validation",
    __doc__,
    "Optimizer post-validation",
    lambda data: (
        f"gloo ranks, F, B, W of a microbatch {data['passes']} ms, {data['iterations']} "
        f"iterations, {data['rounds']} rounds. The time from one iteration to the next, in the "
        "training loop of the checkout"
    ),
    body,
    measure,
    {
        "schedules": "v-zb,zb-h2",
        "sizes": ("4x8,8x16", "ranks x microbatches"),
        "passes": ("100,100,100", "milliseconds of F, B, W"),
        "iterations": 12,
        "rounds": 3,
    },
    ("torch",),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
