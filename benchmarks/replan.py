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
import functools
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import page as pages
from benchmarks.emulated import CPU, SleepingStages, dist, execute, ranks, report_progress, timed
from benchmarks.page import Row, alternating
from megatron_ext.integration import measuring
from megatron_ext.integration.features.profile.measured import agree, durations
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.utils import gather
from megatron_ext.plan.layout import Split
from megatron_ext.plan.profile import Profile
from megatron_ext.plan.times import costs_in_us
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import Placement, check, lower, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.planner import Knowledge
from megatron_ext.schedule.schedule import Schedule

SHAPE = (64,)


class Rank:
    """One rank of the pipeline."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.args = rank, args
        self.watchdog = Watchdog(f"rank {rank}", 120.0)
        milliseconds = map(float, args.passes.split(","))
        self.seconds = dict(zip((Op.F, Op.B, Op.W), (ms / 1e3 for ms in milliseconds)))
        self.results: list[Any] = []

    def step(self, plan: Schedule) -> Recorder:
        """One iteration; notes everything that was computed, exactly."""
        last = plan.placement.num_stages - 1

        def pause(op: Op, stage: int) -> float:
            return self.seconds[op] * (self.args.heavy if stage == last else 1.0)

        stages = SleepingStages(plan, SHAPE, pause)
        recorder = execute(plan, stages, SHAPE, self.watchdog, recorder=Recorder(True, CPU))
        weights = {stage: weight.numpy().tobytes() for stage, weight in stages.weights.items()}
        self.results.append((stages.losses, weights))
        return recorder

    def measure(self, plan: Schedule) -> Profile:
        """One step, measured as training does it."""
        found = durations([(self.step(plan), plan.placement)])
        world = dist.group.WORLD
        ways = Placement.loop(self.args.pp).edges | Placement.vee(self.args.pp).edges
        channel = Channel(connected(world, "passes", ways, CPU), SHAPE, torch.float32, CPU)
        hop = measuring.hop_seconds(channel, world)
        seconds = measuring.pass_seconds(found)
        models = [SimpleNamespace(config=SimpleNamespace())] * plan.chunks
        return agree(plan.placement, self.rank, seconds, hop, models, (1, 1), [world])

    def compare(self, name: str) -> Row:
        """Both orders of one schedule, in turn.

        ``equal`` and ``replanned`` are seconds of a step over all ranks, medians, by order;
        ``gain`` is the share of a step that re-planning saves, median of the rounds' ratios;
        ``simulated_...`` is what the simulator says for the measured profile; ``note`` what
        training would log; ``same`` whether the results of all passes are equal bit for bit;
        ``error`` measured over simulated time of the re-planned order, less 1.
        """
        pp, m = self.args.pp, self.args.microbatches
        choice = ScheduleRequest.of(name).resolve(pp, None, m)
        equal = choice.plan(m)
        found = self.measure(lower(equal))
        costs = found.costs(Split(found.layers))
        new = choice.plan(m, Knowledge(costs=costs, reorder=True, profile=found))
        plans = {"equal": lower(equal), "replanned": lower(new)}
        for plan in plans.values():
            check(plan)
        assert len(set(gather(plans["replanned"].fingerprint()))) == 1
        self.results.clear()
        steps = {
            key: functools.partial(timed, functools.partial(self.step, plan))
            for key, plan in plans.items()
        }
        times = alternating(steps, self.args.rounds, warm=0)
        exact = costs_in_us(found.stages, found.hop or 0.0)
        before, after = (float(simulate(order, exact).makespan) / 1e6 for order in (equal, new))
        gains = [1 - b / a for a, b in zip(times["equal"], times["replanned"])]
        replanned = statistics.median(times["replanned"])
        return {
            "schedule": name,
            "equal": statistics.median(times["equal"]),
            "replanned": replanned,
            "simulated_equal": before,
            "simulated_replanned": after,
            "gain": statistics.median(gains),
            "simulated_gain": 1 - after / before,
            "note": new.note,
            "same": all(gather(all(one == self.results[0] for one in self.results))),
            "error": replanned / after - 1,
        }


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All schedules on one rank."""
    mine = Rank(rank, args)
    rows = []
    for name in args.schedules.split(","):
        rows.append(mine.compare(name))
        report_progress(rows[-1])
    return {"rows": rows}


def body(data: Row) -> list[Any]:
    """The page."""
    lost = [f"`{row['schedule']}`" for row in data["rows"] if row["simulated_gain"] <= 0]
    columns: pages.Columns = {
        "schedule": "`{schedule}`",
        "equal s (simulated)": "{equal:.2f} ({simulated_equal:.2f})",
        "re-planned s (simulated)": "{replanned:.2f} ({simulated_replanned:.2f})",
        "error": "{error:+.1%}",
        "gain (simulated)": "{gain:.1%} ({simulated_gain:.1%})",
        "points": lambda row: f"{100 * (row['gain'] - row['simulated_gain']):+.1f}",
        "results": lambda row: "equal" if row["same"] else "DIFFERENT",
    }
    return [
        "The order for equal costs runs one step and is measured; all ranks agree on the profile, "
        "and the order is made again as under `--pp-profile-steps 1`. *Simulated* is the "
        "simulator's step time for the measured profile. *Error* is measured over simulated of "
        "the re-planned order. *Points* is how far the measured gain is from the simulated one.",
        pages.table(columns, data["rows"]),
        f"Nothing to gain, and the order stays: {', '.join(lost)}." if lost else "",
        "Gains are small where one rank has most of the work: no order makes the heavy stage "
        "shorter, only another layer split does (`megatron-ext plan`). They are large where the "
        "order for equal costs puts passes of unequal length into each other's gaps.",
    ]


BENCHMARK = pages.Benchmark(
    "replan",
    __doc__,
    "Re-planning for measured costs",
    lambda data: (
        "{pp} gloo ranks, {microbatches} microbatches, emulated passes F {0}, B {1}, W {2} ms, the "
        "last stage {heavy:g} times as long; medians of {rounds} alternating rounds"
    ).format(*data["passes"].split(","), **data),
    body,
    lambda args: ranks(args.pp, functools.partial(run_rank, args)),
    {
        "schedules": "v-min,v-zb,interleaved-zb,zb-h1",
        "pp": 4,
        "microbatches": 8,
        "passes": ("120,200,100", "F,B,W of a stage, in ms"),
        "heavy": (1.5, "times that, the last stage"),
        "rounds": 3,
    },
    ("torch",),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
