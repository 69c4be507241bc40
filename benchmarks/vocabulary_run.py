#!/usr/bin/env python3
"""Steps with a sharded vocabulary beside their simulation, with emulated costs.

    python -m benchmarks.vocabulary_run [--pp 4] [--microbatches 8] [--unit-ms 150] [--repeats 3]
        [--schedules 1f1b,...] [--check] [--output DIR] [--date YYYY-MM-DD]

Every schedule runs twice, in turn, on gloo ranks of this machine in one process group: with the
embedding and the output layer on the first and on the last stage, and with the vocabulary over all
ranks. Executor, messages, collectives and the arithmetic of the shards (of a small vocabulary) are
real; a pass also sleeps: F, B and W of a rank's layers ``--unit-ms`` each, S a quarter of it and T
an eighth, E and G a hundredth; on one rank the same work takes as many times longer. Writes
results/DATE-vocabulary-run.json and vocabulary_run.md; ``--check`` exits with 1 on a miss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import add_arguments, measured, save
from megatron_ext.integration import measuring
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.collectives import collectives
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import Executor, StageRunner
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.vocabulary import Batch, Operands, VocabularyPasses
from megatron_ext.runtime.vocabulary_shards import EmbeddingShard, OutputShard, Scores
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import Costs, Schedule, check, generate, lower, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from megatron_ext.schedule.vocabulary import E, G, S, T

SCHEDULES = "1f1b,interleaved,zb-h1,interleaved-zb,v-min,v-half,v-zb"
SHARES = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 100), Fraction(1, 100))  # S, T, E, G
CPU = torch.device("cpu")
SEQUENCE, BATCH, HIDDEN, ROWS = 8, 2, 8, 16  # rows of the vocabulary on a rank


def plan_of(name: str, pp: int, microbatches: int, sharded: bool) -> Schedule:
    """The lowered order, made for the costs that the passes then have."""
    chunks = generate(name, pp, 1).chunks
    stages = [[Fraction(1, chunks)] * 3 for _ in range(pp * chunks)]
    if not sharded:
        s, t, e, g = (pp * share for share in SHARES)
        # S is the layer's F and its input gradient, in equal parts.
        ends = ((0, (e, g, 0)), (-1, (s / 2, s / 2, t)))
        for stage, more in ends:
            stages[stage] = [a + b for a, b in zip(stages[stage], more)]
    costs = Costs.of(1, 1, 1, stages=stages, vocabulary=SHARES if sharded else None)
    order = generate(name, pp, microbatches, costs=costs)
    plan = lower(add_vocabulary(order) if sharded else order)
    check(plan)
    return plan


class Runner(StageRunner):
    """Stages that multiply by one and sleep.

    Args:
        plan: lowered.
        rank: of the pipeline.
        unit: seconds of a cost of 1.
    """

    def __init__(self, plan: Schedule, rank: int, unit: float) -> None:
        self._placement, self._rank = plan.placement, rank
        self._durations, self._unit = plan.costs.durations(plan.placement), unit
        self._last = plan.placement.num_stages - 1
        self.passes: VocabularyPasses | None = None
        self.losses = 0.0

    def spend(self, op: Any, chunk: int = 0) -> None:
        """Take the time of a pass."""
        stage = self._placement.stages[self._rank][chunk]
        time.sleep(self._unit * self._durations.of(op, stage) / self._durations.scale)

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        stage = self._placement.stages[self._rank][chunk]
        if stage == 0 and self.passes is not None:
            x = self.passes.embeddings(microbatch).transpose(0, 1).contiguous()
        y = torch.ones(SEQUENCE, BATCH, HIDDEN) if x is None else x.clone()
        self.spend(Op.F, chunk)
        if stage == self._last and self.passes is not None:
            self.passes.put_hidden(microbatch, y, self.token_ids(microbatch))
        return y

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        stage = self._placement.stages[self._rank][chunk]
        if stage == self._last and self.passes is not None:
            losses = self.passes.losses(microbatch)
            self.losses += float(losses.sum())
            grad = self.passes.input_gradient(microbatch, torch.ones_like(losses))
        grad = torch.ones(SEQUENCE, BATCH, HIDDEN) if grad is None else grad.clone()
        self.spend(Op.B if split else Op.BW, chunk)
        if stage == 0 and self.passes is not None:
            self.passes.put_embedding_gradient(microbatch, grad.transpose(0, 1))
        return grad

    def weight(self, chunk: int, microbatch: int) -> None:
        self.spend(Op.W, chunk)

    def live_sets(self) -> int:
        return 0

    def begin(self) -> None:
        """No weights to wait for."""

    def token_ids(self, microbatch: int) -> torch.Tensor:
        """(microbatch, sequence)."""
        generator = torch.Generator().manual_seed(microbatch)
        return torch.randint(ROWS * self._placement.pp, (BATCH, SEQUENCE), generator=generator)

    def output_gradient(self, microbatch: int, operands: Operands) -> None:
        """T."""
        for x, grad in operands:
            grad.t() @ x
        self.spend(T)

    def embedding_gradient(self, microbatch: int, grad: torch.Tensor) -> None:
        """G."""
        self.spend(G)

    def evaluate(self, microbatch: int) -> None:
        """Nothing is evaluated."""


class SleepingOutput(OutputShard):
    """S takes its time."""

    spend: Callable[[Any], None]

    def score(self, hidden: torch.Tensor, labels: torch.Tensor) -> Scores:
        self.spend(S)
        return super().score(hidden, labels)


class SleepingEmbedding(EmbeddingShard):
    """E takes its time."""

    spend: Callable[[Any], None]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        self.spend(E)
        return super().embed(ids)


def step(plan: Schedule, group: dist.ProcessGroup, unit: float) -> tuple[float, float]:
    """(seconds, sum of losses) of one iteration on this rank."""
    rank = group.rank()
    runner, shape = Runner(plan, rank, unit), (SEQUENCE, BATCH, HIDDEN)
    if plan.vocabulary is not None:
        generator = torch.Generator().manual_seed(rank)
        weight = torch.randn(ROWS, HIDDEN, generator=generator)
        embedding, output = (
            SleepingEmbedding(weight, rank * ROWS),
            SleepingOutput(weight, rank * ROWS),
        )
        embedding.spend = output.spend = runner.spend
        batch = Batch((BATCH, SEQUENCE), shape, torch.float32, CPU)
        all_ranks = collectives(group, CPU)
        runner.passes = VocabularyPasses(plan, all_ranks, embedding, output, batch, runner)
    edges = connected(group, "passes", plan.placement.edges, CPU)
    channel = Channel(edges, shape, torch.float32, CPU)
    watchdog, recorder = Watchdog("benchmark", 60), Recorder(False, CPU)
    executor = Executor(plan, rank, runner, channel, watchdog, recorder, runner.passes)
    dist.barrier()
    started = time.perf_counter()
    executor.run()
    return time.perf_counter() - started, runner.losses


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """All schedules on one rank; rank 0 writes what came out."""
    store = dist.FileStore(str(folder / "store"), args.pp)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=args.pp, timeout=timedelta(minutes=5)
    )
    group, unit = dist.group.WORLD, args.unit_ms / 1e3
    assert group is not None
    plans = {
        (name, sharded): plan_of(name, args.pp, args.microbatches, sharded)
        for name in args.schedules.split(",")
        for sharded in (False, True)
    }
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in plans}
    losses = set()
    for round_ in range(args.repeats + 1):
        for key, plan in plans.items():
            took, loss = step(plan, group, unit if round_ else 0.0)
            every = measuring.gather((took, loss))
            losses |= {round(one, 3) for _, one in every if one}
            times[key] += [max(one for one, _ in every)] if round_ else []
    if len(losses) != 1:
        raise RuntimeError(f"steps computed different losses: {losses}")
    rows = []
    for (name, sharded), plan in plans.items():
        run = simulate(plan)
        seconds = float(run.makespan) * unit
        row = {
            "name": name,
            "sharded": sharded,
            "peak": float(max(run.peak_activation)),
            "simulated": seconds,
            "step": statistics.median(times[name, sharded]),
            "times": times[name, sharded],
        }
        rows.append({**row, "error": row["step"] / seconds - 1})  # type: ignore[operator]
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()


def page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The results in Markdown."""
    worst = max(rows, key=lambda row: abs(row["error"]))
    kind = {False: "heavy ends", True: "sharded"}
    lines = [
        "# Steps with a sharded vocabulary, with emulated costs",
        "",
        f"`python -m benchmarks.vocabulary_run`, {about['date']}: {about['pp']} gloo ranks, "
        f"m = {about['microbatches']}, F = B = W = {about['unit_ms']:g} ms of a rank's layers, "
        f"S, T, E and G of a rank {', '.join(f'{float(x):g}' for x in SHARES)} of it; "
        f"{about['repeats']} alternating rounds after one without pauses; Python "
        f"{about['python']}, torch {about['torch']}, {about['machine']}; ranks at "
        f"{about['priority']}, load {about['load']}.",
        "",
        "*Heavy ends*: embedding and output layer take as long on the first and the last stage as "
        "on all ranks together. *Simulated*: without time for messages and collectives. All steps "
        "computed the same losses.",
        "",
        f"Furthest from its simulation: {worst['name']}, {kind[worst['sharded']]}, "
        f"{worst['error']:+.2%} (to be shown: within 3 %, "
        f"{'holds' if abs(worst['error']) <= 0.03 else '**missed**'}).",
        "",
        "| schedule | vocabulary | peak | simulated s | median s | error | heavy ends over it |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    base = {row["name"]: row["times"] for row in rows if not row["sharded"]}
    for row in rows:
        ratio = statistics.median(a / b for a, b in zip(base[row["name"]], row["times"]))
        lines.append(
            f"| {row['name']} | {kind[row['sharded']]} | {row['peak']:g} | {row['simulated']:.3f} "
            f"| {row['step']:.3f} | {row['error']:+.2%} | {ratio:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--schedules", default=SCHEDULES, help="comma-separated")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=150.0, help="F, B, W of a rank's layers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a run is 3 % off")
    add_arguments(parser)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = measured(args, args.pp, run_rank, ("pp", "microbatches", "unit_ms", "repeats"))
    if found is None:
        return 1
    rows, about = found
    save(args, "vocabulary-run", rows, about)
    (args.output / "vocabulary_run.md").write_text(page(rows, about))
    missed = [row for row in rows if abs(row["error"]) > 0.03]
    for row in rows:
        print(f"{row['name']} {row['sharded']}: {row['step']:.3f} s, {row['error']:+.2%}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
