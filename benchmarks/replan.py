#!/usr/bin/env python3
"""Re-planning for measured costs: what it gains, beside what the simulator said it would.

    python -m benchmarks.replan [--schedules v-min,v-zb,...] [--pp 4] [--microbatches 8]
        [--passes 120,200,100] [--heavy 1.5] [--rounds 3] [--output DIR] [--date YYYY-MM-DD]

Runs the executor on gloo ranks of this machine. A pass is a pause (so two cores are enough for many
ranks): F, B and W of ``--passes`` milliseconds, ``--heavy`` times as long on the last stage. As in
training under ``--pp-profile-steps 1``, the order for equal costs runs one step, which is measured;
all ranks agree on the profile, and the order is made again for it. Then both run in turn,
``--rounds`` times. What the passes compute depends on their order within a stage and is compared
bit for bit. Writes results/DATE-replan.json and replan.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import add_arguments, measured, save
from megatron_ext.integration import measuring
from megatron_ext.integration.callbacks import PlanInputs
from megatron_ext.integration.features.profile.profiler import Profiler
from megatron_ext.integration.features.schedule.choose import Measured, ScheduleRequest
from megatron_ext.plan.layout import Split
from megatron_ext.plan.profile import Profile
from megatron_ext.plan.times import costs_in_us
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Placement, check, lower, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.schedule import Schedule

HERE = Path(__file__).resolve().parent

WIDTH = 64


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        schedule: its name.
        equal, replanned: seconds of a step over all ranks, medians, by order.
        simulated_equal, simulated_replanned: what the simulator says for the measured profile.
        gain: share of a step that re-planning saves, median of the rounds' ratios.
        simulated_gain: the same in the simulation.
        note: what training would log.
        same: the results of all passes are equal bit for bit.
    """

    schedule: str
    equal: float
    replanned: float
    simulated_equal: float
    simulated_replanned: float
    gain: float
    simulated_gain: float
    note: str
    same: bool

    @property
    def error(self) -> float:
        """Measured over simulated time of the re-planned order, less 1."""
        return self.replanned / self.simulated_replanned - 1


class PausingRunner:
    """A model whose passes take time, and whose results show in which order they were computed."""

    def __init__(self, plan: Schedule, rank: int, pauses: dict[tuple[Op, int], float]) -> None:
        self._stages, self._last = plan.placement.stages[rank], plan.placement.num_stages - 1
        self._pauses = pauses
        self._live: dict[tuple[int, int], Any] = {}
        self.weights = {stage: torch.zeros(WIDTH) for stage in self._stages}
        self.losses: list[float] = []

    def _pause(self, op: Op, stage: int) -> None:
        time.sleep(self._pauses[op, stage])

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """F."""
        stage = self._stages[chunk]
        self._pause(Op.F, stage)
        x = torch.linspace(0, 1 + microbatch, WIDTH) if x is None else x
        y = torch.sin(x * (1.1 + stage))
        self._live[chunk, microbatch] = x, y
        if stage < self._last:
            return y
        self.losses.append(float(y.sum()))
        return None

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        """B or BW."""
        stage = self._stages[chunk]
        self._pause(Op.B, stage)
        x, y = self._live[chunk, microbatch]
        grad = torch.cos(y) if grad is None else grad
        self._live[chunk, microbatch] = x, grad
        if not split:
            self.weight(chunk, microbatch)
        return torch.cos(x * (1.1 + stage)) * grad

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        stage = self._stages[chunk]
        self._pause(Op.W, stage)
        x, grad = self._live.pop((chunk, microbatch))
        # Another order of the microbatches would give another sum.
        self.weights[stage] = self.weights[stage] * 0.9 + x * grad

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """Nothing is offloaded."""

    def live_sets(self) -> int:
        """Sets held now."""
        return len(self._live)

    def results(self) -> tuple[Any, ...]:
        """Everything that was computed, exactly."""
        return self.losses, {s: w.numpy().tobytes() for s, w in self.weights.items()}


class Rank:
    """One rank of the pipeline."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.args = rank, args
        self.watchdog = Watchdog(f"rank {rank}", 120.0)
        cpu = torch.device("cpu")
        ways = Placement.loop(args.pp).edges | Placement.vee(args.pp).edges
        edges = connected(dist.group.WORLD, "passes", ways, cpu)
        self.channel = Channel(edges, (WIDTH,), torch.float32, cpu)

    def step(self, plan: Schedule) -> tuple[float, Recorder, tuple[Any, ...]]:
        """One iteration: seconds from all ranks' start to the last one's end, times, results."""
        pauses = {
            (op, stage): ms / 1e3 * (self.args.heavy if stage == len_(plan) - 1 else 1.0)
            for op, ms in zip((Op.F, Op.B, Op.W), self.args.milliseconds)
            for stage in range(len_(plan))
        }
        runner = PausingRunner(plan, self.rank, pauses)
        recorder = Recorder(True, torch.device("cpu"))
        dist.barrier()
        started = time.perf_counter()
        with self.watchdog.armed():
            Executor(plan, self.rank, runner, self.channel, self.watchdog, recorder).run()
        took = time.perf_counter() - started
        return max(measuring.gather(took)), recorder, runner.results()

    def measure(self, plan: Schedule) -> Profile:
        """One step, measured as training does it."""
        profiler = Profiler(PlanInputs(), WeightGradStore(), 1)
        _, recorder, _ = self.step(plan)
        assert profiler.add(recorder, plan.placement)
        hop = measuring.hop_seconds(self.channel, dist.group.WORLD)
        chunk = SimpleNamespace(config=SimpleNamespace())
        seconds = measuring.pass_seconds(profiler.take())
        models = [chunk] * plan.chunks
        world = [dist.group.WORLD]
        return profiler.agree(plan.placement, self.rank, seconds, hop, models, (1, 1), world)

    def compare(self, name: str) -> Row:
        """Both orders of one schedule, in turn."""
        pp, m = self.args.pp, self.args.microbatches
        choice = ScheduleRequest.of(name).resolve(pp, None, m)
        equal = choice.plan(m)
        first = lower(equal)
        found = self.measure(first)
        costs = found.costs(Split(found.layers))
        new = choice.plan(m, Measured(costs=costs, reorder=True, profile=found))
        plans = {"equal": first, "replanned": lower(new)}
        for plan in plans.values():
            check(plan)
        assert len(set(measuring.gather(plans["replanned"].fingerprint()))) == 1
        times: dict[str, list[float]] = {key: [] for key in plans}
        results = []
        for _ in range(self.args.rounds):
            for key, plan in plans.items():
                seconds, _, result = self.step(plan)
                times[key].append(seconds)
                results.append(result)
        exact = costs_in_us(found.stages, found.hop or 0.0)
        before, after = (float(simulate(order, exact).makespan) / 1e6 for order in (equal, new))
        gains = [1 - b / a for a, b in zip(times["equal"], times["replanned"])]
        return Row(
            name,
            statistics.median(times["equal"]),
            statistics.median(times["replanned"]),
            before,
            after,
            statistics.median(gains),
            1 - after / before,
            new.note,
            all(measuring.gather(all(result == results[0] for result in results))),
        )


def len_(plan: Schedule) -> int:
    """Number of stages."""
    return plan.placement.num_stages


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """All schedules on one rank; rank 0 writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.pp
    )
    mine = Rank(rank, args)
    rows = []
    for name in args.schedules.split(","):
        rows.append(mine.compare(name))
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        text = [{**asdict(row), "error": row.error} for row in rows]
        (folder / "rows.json").write_text(json.dumps(text))
    dist.barrier()


def page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The results in Markdown."""
    f, b, w = about["passes"].split(",")
    lines = [
        "# Re-planning for measured costs",
        "",
        f"`python -m benchmarks.replan`, {about['date']}: {about['pp']} gloo ranks, "
        f"{about['microbatches']} microbatches, emulated passes F {f}, B {b}, W {w} ms, the last "
        f"stage {about['heavy']:g} times as long; medians of {about['rounds']} alternating rounds; "
        f"Python {about['python']}, torch {about['torch']}, {about['machine']}, load "
        f"{about['load']}.",
        "",
        "The order for equal costs runs one step and is measured; all ranks agree on the profile, "
        "and the order is made again as under `--pp-profile-steps 1`. *Simulated* is the "
        "simulator's step time for the measured profile. *Error* is measured over simulated of "
        "the re-planned order. *Points* is how far the measured gain is from the simulated one.",
        "",
        "| schedule | equal s (simulated) | re-planned s (simulated) | error | gain (simulated) "
        "| points | results |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = (
            f"`{row['schedule']}`",
            f"{row['equal']:.2f} ({row['simulated_equal']:.2f})",
            f"{row['replanned']:.2f} ({row['simulated_replanned']:.2f})",
            f"{row['error']:+.1%}",
            f"{row['gain']:.1%} ({row['simulated_gain']:.1%})",
            f"{100 * (row['gain'] - row['simulated_gain']):+.1f}",
            "equal" if row["same"] else "DIFFERENT",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lost = [row["schedule"] for row in rows if row["simulated_gain"] <= 0]
    if lost:
        names = ", ".join(f"`{name}`" for name in lost)
        lines += ["", f"Nothing to gain, and the order stays: {names}."]
    lines += [
        "",
        "Gains are small where one rank has most of the work: no order makes the heavy stage "
        "shorter, only another layer split does (`megatron-ext plan`). They are large where the "
        "order for equal costs puts passes of unequal length into each other's gaps.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--schedules", default="v-min,v-zb,interleaved-zb,zb-h1")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--passes", default="120,200,100", help="F,B,W of a stage, in ms")
    parser.add_argument("--heavy", type=float, default=1.5, help="times that, the last stage")
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()
    args.milliseconds = [float(x) for x in args.passes.split(",")]
    found = measured(args, args.pp, run_rank, ("pp", "microbatches", "passes", "heavy", "rounds"))
    if found is None:
        return 1
    rows, about = found
    save(args, "replan", rows, about)
    (args.output / "replan.md").write_text(page(rows, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
