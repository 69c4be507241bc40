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
import platform
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import add_arguments, priority, save
from megatron_ext.prove.server import ScriptServer
from megatron_ext.schedule import lower, simulate
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import GENERATORS, generate
from megatron_ext.schedule.post_validation import add_post_validation, steady_time
from tests.support import ROOT

HERE = Path(__file__).resolve().parent

TAG = "core_v0.19.0"
MODEL = """--hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --mock-data
--tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --eval-iters 1 --eval-interval 1000
--log-interval 100 --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch_dist
--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --clip-grad 20
--rerun-mode disabled --no-check-for-nan-in-loss-and-grad"""
SETTLED = 3  # iterations at the begin that are not timed


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        schedule: its name.
        pp, microbatches: of the pipeline.
        usual, ahead: seconds of an iteration, medians over rounds of each run's median.
        simulated_usual, simulated_ahead: what the simulator says.
        gain: share of an iteration that is saved, median of the rounds' ratios.
        simulated_gain: the same in the simulation.
        undone: iterations' time that an undone step costs, beside the same run without it.
        same: all runs agree bit for bit.
    """

    schedule: str
    pp: int
    microbatches: int
    usual: float
    ahead: float
    simulated_usual: float
    simulated_ahead: float
    gain: float
    simulated_gain: float
    undone: float
    same: bool


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
        flags += f" --train-iters {args.iterations}"
        if GENERATORS[name].any_chunks:
            flags += f" --num-virtual-stages-per-pipeline-rank {chunks}"
        if ahead:
            flags += " --pp-post-validation 0"
        faults = [] if fault is None else [{"iteration": fault, "rank": pp - 1, "factor": 1e6}]
        value = {"faults": faults, "pace": [ms / chunks for ms in args.milliseconds]}
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
        """With and without, in turn; and once with a step that has to be undone."""
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
        return Row(
            name,
            pp,
            microbatches,
            usual,
            ahead,
            float(simulated[0]) / 1e3,
            float(simulated[1]) / 1e3,
            statistics.median(gains),
            float(1 - simulated[1] / simulated[0]),
            lost / ahead,
            same,
        )


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """The Markdown page."""
    lines = [
        "# Optimizer post-validation",
        "",
        f"{about['date']}, {about['machine']}; load {about['load']}, ranks at "
        f"{about['priority']}. "
        f"`python -m benchmarks.post_validation`: gloo ranks, F, B, W of a microbatch "
        f"{about['passes']} ms, {about['iterations']} iterations, {about['rounds']} rounds. The "
        "time from one iteration to the next, in the training loop of Megatron "
        f"{about['megatron']}.",
        "",
        "| schedule | p | m | without, s | simulated | with, s | simulated | gain | simulated | an "
        "undone step costs | bit for bit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.schedule} | {row.pp} | {row.microbatches} | {row.usual:.3f} | "
            f"{row.simulated_usual:.3f} | {row.ahead:.3f} | "
            f"{row.simulated_ahead:.3f} | {row.gain:.2%} | {row.simulated_gain:.2%} | "
            f"{row.undone:.2f} iterations | {'yes' if row.same else '**no**'} |"
        )
    lines += [
        "",
        "Measured times hold what the simulated ones do not: the optimizer, Megatron's own work, "
        "and messages. An undone step costs what all iterations of a run with one "
        "undone step took, less as many median ones.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", default="v-zb,zb-h2")
    parser.add_argument("--sizes", default="4x8,8x16", help="ranks x microbatches")
    parser.add_argument("--passes", default="100,100,100", help="milliseconds of F, B, W")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()
    args.milliseconds = [int(x) for x in args.passes.split(",")]
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
                print(asdict(rows[-1]), flush=True)
                load.append(os.getloadavg()[0])
    names = ("passes", "iterations", "rounds")
    about = {"date": args.date, "machine": args.machine, "python": platform.python_version()}
    about |= {
        "megatron": TAG,
        "priority": priority(),
        "load": f"{min(load):.1f} to {max(load):.1f}",
    }
    about |= {name: getattr(args, name) for name in names}
    save(args, "post-validation", [asdict(row) for row in rows], about)
    (args.output / "post_validation.md").write_text(page(rows, about))


if __name__ == "__main__":
    main()
