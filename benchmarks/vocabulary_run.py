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
import functools
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from benchmarks import page as pages
from benchmarks.emulated import (
    BESIDE,
    CPU,
    SleepingStages,
    beside,
    dist,
    execute,
    gather,
    ranks,
    timed,
)
from benchmarks.page import Claim, Row, alternating, ratio
from megatron_ext.runtime.collectives import collectives
from megatron_ext.runtime.vocabulary import Batch, Operands, VocabularyPasses
from megatron_ext.runtime.vocabulary_shards import EmbeddingShard, OutputShard, Scores
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import Costs, Schedule, check, generate, lower, simulate
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from megatron_ext.schedule.vocabulary import E, G, S, T

SCHEDULES = "1f1b,interleaved,zb-h1,interleaved-zb,v-min,v-half,v-zb"
SHARES = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 100), Fraction(1, 100))  # S, T, E, G
SEQUENCE, BATCH, HIDDEN, ROWS = 8, 2, 8, 16  # rows of the vocabulary on a rank
SHAPE = (SEQUENCE, BATCH, HIDDEN)


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


class Runner(SleepingStages):
    """Stages that multiply by one, between the passes of a sharded vocabulary if there is one.

    Args:
        plan: lowered.
        unit: seconds of a cost of 1.
    """

    def __init__(self, plan: Schedule, unit: float) -> None:
        durations = plan.costs.durations(plan.placement)
        self._seconds = lambda op, stage: unit * durations.of(op, stage) / durations.scale
        super().__init__(plan, SHAPE, self._seconds)
        self._rows = ROWS * plan.placement.pp
        self.passes: VocabularyPasses | None = None
        self.sum = 0.0

    def factor(self, stage: int) -> float:
        return 1.0

    def take(self, op: Any) -> None:
        """The time of a pass of the vocabulary."""
        time.sleep(self._seconds(op, self.stages[0]))

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        stage = self.stages[chunk]
        if stage == 0 and self.passes is not None:
            x = self.passes.embeddings(microbatch).transpose(0, 1).contiguous()
        y = super().forward(chunk, microbatch, x)
        if stage == self.last and self.passes is not None:
            self.passes.put_hidden(microbatch, y, self.token_ids(microbatch))
        return y

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        stage = self.stages[chunk]
        if stage == self.last and self.passes is not None:
            losses = self.passes.losses(microbatch)
            self.sum += float(losses.sum())
            grad = self.passes.input_gradient(microbatch, torch.ones_like(losses))
        grad = super().backward(chunk, microbatch, grad, split)
        if stage == 0 and self.passes is not None:
            self.passes.put_embedding_gradient(microbatch, grad.transpose(0, 1))
        return grad

    def begin(self) -> None:
        """No weights to wait for."""

    def token_ids(self, microbatch: int) -> torch.Tensor:
        """(microbatch, sequence)."""
        generator = torch.Generator().manual_seed(microbatch)
        return torch.randint(self._rows, (BATCH, SEQUENCE), generator=generator)

    def output_gradient(self, microbatch: int, operands: Operands) -> None:
        """T."""
        for x, grad in operands:
            grad.t() @ x
        self.take(T)

    def embedding_gradient(self, microbatch: int, grad: torch.Tensor) -> None:
        """G."""
        self.take(G)

    def evaluate(self, microbatch: int) -> None:
        """Nothing is evaluated."""


class SleepingOutput(OutputShard):
    """S takes its time."""

    take: Callable[[Any], None]

    def score(self, hidden: torch.Tensor, labels: torch.Tensor) -> Scores:
        self.take(S)
        return super().score(hidden, labels)


class SleepingEmbedding(EmbeddingShard):
    """E takes its time."""

    take: Callable[[Any], None]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        self.take(E)
        return super().embed(ids)


def runner_of(plan: Schedule, unit: float) -> Runner:
    """Of one iteration on this rank."""
    rank, runner = dist.get_rank(), Runner(plan, unit)
    if plan.vocabulary is not None:
        generator = torch.Generator().manual_seed(rank)
        weight = torch.randn(ROWS, HIDDEN, generator=generator)
        embedding = SleepingEmbedding(weight, rank * ROWS)
        output = SleepingOutput(weight, rank * ROWS)
        embedding.take = output.take = runner.take
        batch = Batch((BATCH, SEQUENCE), SHAPE, torch.float32, CPU)
        every = collectives(dist.group.WORLD, CPU)
        runner.passes = VocabularyPasses(plan, every, embedding, output, lambda unit: batch, runner)
    return runner


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All schedules on one rank."""
    plans = {
        (name, sharded): plan_of(name, args.pp, args.microbatches, sharded)
        for name in args.schedules.split(",")
        for sharded in (False, True)
    }
    losses = set()
    watchdog = Watchdog("benchmark", 60)

    def step(plan: Schedule, unit: float) -> float:
        runner = runner_of(plan, unit)
        took = timed(lambda: execute(plan, runner, SHAPE, watchdog, passes=runner.passes))
        losses.update(round(one, 3) for one in gather(runner.sum) if one)
        return took

    def steps(unit: float) -> dict[Any, Callable[[], float]]:
        return {key: functools.partial(step, plan, unit) for key, plan in plans.items()}

    alternating(steps(0.0), 1, warm=0)
    times = alternating(steps(args.unit_ms / 1e3), args.repeats, warm=0)
    if len(losses) != 1:
        raise RuntimeError(f"steps computed different losses: {losses}")
    rows = []
    for (name, sharded), plan in plans.items():
        run = simulate(plan)
        row = {"name": name, "sharded": sharded, "peak": float(max(run.peak_activation))}
        seconds = float(run.makespan) * args.unit_ms / 1e3
        rows.append({**row, **beside(times[name, sharded], seconds)})
    return {"rows": rows}


KIND = {False: "heavy ends", True: "sharded"}


def claims(data: Row) -> list[Claim]:
    """That every run is close to its simulation."""
    worst = max(data["rows"], key=lambda row: abs(row["error"]))
    text = f"furthest: {worst['name']}, {KIND[worst['sharded']]}, {worst['error']:+.2%}"
    what = "every step within 3 % of its simulation"
    return [Claim(what, text, abs(worst["error"]) <= 0.03)]


def body(data: Row) -> list[Any]:
    """The page."""
    base = {row["name"]: row["times"] for row in data["rows"] if not row["sharded"]}
    columns: pages.Columns = {
        "schedule": "{name}",
        "vocabulary": lambda row: KIND[row["sharded"]],
        "peak": "{peak:g}",
        **BESIDE,
        "heavy ends over it": lambda row: f"{ratio(base[row['name']], row['times']):.3f}",
    }
    return [
        "*Heavy ends*: embedding and output layer take as long on the first and the last stage as "
        "on all ranks together. *Simulated*: without time for messages and collectives. All steps "
        "computed the same losses.",
        pages.verdicts(claims(data)),
        pages.table(columns, data["rows"]),
    ]


BENCHMARK = pages.Benchmark(
    "vocabulary-run",
    __doc__,
    "Steps with a sharded vocabulary, with emulated costs",
    lambda data: (
        f"{data['pp']} gloo ranks, m = {data['microbatches']}, F = B = W = "
        f"{data['unit_ms']:g} ms of a rank's layers, S, T, E and G of a rank "
        f"{', '.join(f'{float(x):g}' for x in SHARES)} of it; {data['repeats']} alternating "
        "rounds after one without pauses"
    ),
    body,
    lambda args: ranks(args.pp, functools.partial(run_rank, args)),
    {
        "schedules": (SCHEDULES, "comma-separated"),
        "pp": 4,
        "microbatches": 8,
        "unit_ms": (150.0, "F, B, W of a rank's layers"),
        "repeats": 3,
    },
    ("torch",),
    claims,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
