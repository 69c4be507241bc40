#!/usr/bin/env python3
"""Offloading on an emulated link: what it saves and what it costs, beside what was planned.

    python -m benchmarks.offload [--schedules v-half,interleaved,po] [--pp 4] [--microbatches 16]
        [--policy single] [--pass-ms 10] [--repeats 5] [--output DIR] [--date YYYY-MM-DD]

Runs the executor, the activation store and the transfer engine on gloo ranks of this machine. A
pass is a pause of ``--pass-ms`` (so two cores are enough for many ranks), a set is one tensor, and
the link is a copy thread that takes T times F+B+W of a chunk each way. For k = 2T of 0.5, 1, 1.5
and 2, one step each of no, half, full and auto offload in turn, ``--repeats`` times; every
activation that comes back is checked. Writes results/DATE-offload.json and offload.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from benchmarks import offload_host
from benchmarks import page as pages
from benchmarks.emulated import SleepingStages, execute, gather, ranks, report_progress, timed
from benchmarks.page import Row, alternating, ratio
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice, Direction
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import check, generate, lower, offload_pass, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.link import Link
from megatron_ext.schedule.schedule import Schedule

SET_BYTES = 256 << 10
MODES = ("none", "half", "full", "auto")
CHUNKS = {"po": 4, "interleaved": 4}
KS = ("0.5", "1", "1.5", "2")


class Hold(torch.autograd.Function):
    """Keeps ``activations`` for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: torch.Tensor, taken: Any) -> torch.Tensor:
        """The input, as it is."""
        ctx.save_for_backward(activations)
        ctx.taken = taken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Hands over what was kept."""
        ctx.taken(ctx.saved_tensors[0])
        return grad, None, None


class OffloadedStages(SleepingStages):
    """Stages whose sets take memory that ``store`` moves."""

    def __init__(self, plan: Schedule, store: ActivationStore, pause: float) -> None:
        super().__init__(plan, (1,), lambda op, stage: pause)
        self._store = store
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        self.spend(Op.F, chunk)
        key = (chunk, microbatch)
        x = torch.zeros(1) if x is None else x
        x.requires_grad_(True)
        value = 100 * microbatch + chunk

        def taken(saved: torch.Tensor) -> None:
            assert float(saved[0]) == float(saved[-1]) == value, "a wrong activation came back"
            self._kept[key] = saved

        with self._store.saving(key):
            y = Hold.apply(x, torch.full((SET_BYTES // 4,), float(value)), taken)
        self._live[key] = x, y
        return y.detach()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        self.spend(Op.B, chunk)
        x, y = self._live[chunk, microbatch]
        torch.autograd.backward(y, torch.ones(1) if grad is None else grad)
        self._live[chunk, microbatch] = None
        if not split:
            self.weight(chunk, microbatch)
        gradient: torch.Tensor = x.grad
        return gradient

    def weight(self, chunk: int, microbatch: int) -> None:
        self.spend(Op.W, chunk)
        key = (chunk, microbatch)
        del self._kept[key], self._live[key]
        self._store.finish(key)

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        getattr(self._store, op.value.lower())((chunk, microbatch))

    def live_sets(self) -> int:
        return len(self._store) - len(self._store.away())


class Case:
    """One plan, ready to run again and again on one rank."""

    def __init__(self, plan: Schedule, rank: int, pause: float, time_: float | None) -> None:
        self.plan = lower(plan)
        self.report = check(self.plan)
        self._rank, self._pause = rank, pause
        rate = None
        if time_ is not None:
            rate = dict.fromkeys(Direction, SET_BYTES / (time_ * 3 * pause))
        hosts = self.report.peak_host_sets[rank] if self.report.peak_host_sets else 0
        device = CpuDevice(throttle_bytes_per_second=rate)
        arena = HostArena(device.torch_device, hosts * SET_BYTES)
        policy = plan.link.policy if plan.link is not None else "single"
        assert policy != "paired", "the emulated link has no neighbours"
        self.store = ActivationStore(Engine(device, arena, policy))
        self.peak = 0

    def step(self) -> None:
        """One iteration."""
        runner = OffloadedStages(self.plan, self.store, self._pause)
        recorder = execute(self.plan, runner, (1,), Watchdog(f"rank {self._rank}", 120.0))
        self.store.end_step()
        self.peak = max(self.peak, recorder.peak_sets)

    def late(self) -> tuple[int, int]:
        """Waits for unfinished copies, and occasions for them."""
        counters = self.store.engine.counters
        waits = counters.waited_releases + counters.waited_uses
        return waits, 2 * counters.offloads

    def close(self) -> None:
        """End its threads."""
        self.store.engine.close()


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All cases on one rank."""
    rows = []
    for name in args.schedules.split(","):
        for k in args.ks.split(","):
            rows += measure(name, k, rank, args)
            report_progress("\n".join(map(str, rows[-len(MODES) :])))
    return {"rows": rows}


def measure(name: str, k: str, rank: int, args: argparse.Namespace) -> list[Row]:
    """All amounts of offload on one link, in turn.

    ``step`` and ``least`` are seconds of a step over all ranks, median and minimum; ``slower`` is
    the median of the rounds' ratios to no offload, less 1, ``planned_slower`` the same in the
    simulation; ``sets`` the most on any rank, counted while it ran, ``planned_sets`` by the plan;
    ``moved`` the share of sets that leave the device; ``late`` the share of RELEASE actions and
    first uses that found their copy unfinished.
    """
    way = Fraction(k) / 2
    base = generate(name, args.pp, args.microbatches, CHUNKS.get(name))
    link = Link.of(args.pp, way, policy=args.policy)
    plans = {mode: base if mode == "none" else offload_pass(base, link, mode).schedule
             for mode in MODES}  # fmt: skip
    pause = args.pass_ms / 1e3
    cases = {mode: Case(plan, rank, pause, float(way)) for mode, plan in plans.items()}
    steps = {mode: functools.partial(timed, case.step) for mode, case in cases.items()}
    times = alternating(steps, args.repeats)
    rows = []
    total = args.pp * base.chunks * args.microbatches
    for mode, case in cases.items():
        peaks, waits, occasions = zip(*gather((case.peak, *case.late())))
        planned = simulate(plans[mode]).makespan / simulate(base).makespan
        rows.append(
            {
                "schedule": name,
                "k": k,
                "mode": mode,
                "step": statistics.median(times[mode]),
                "least": min(times[mode]),
                "slower": ratio(times[mode], times["none"]) - 1,
                "planned_slower": float(planned) - 1,
                "sets": max(peaks),
                "planned_sets": max(case.report.peak_sets),
                "moved": sum(case.report.offloaded_sets) / total,
                "late": sum(waits) / max(1, sum(occasions)),
            }
        )
        case.close()
    return rows


def body(data: Row) -> list[Any]:
    """The page but for the host's part."""
    columns: pages.Columns = {
        "k": "{k}",
        "offload": "{mode}",
        "sets leave": "{moved:.0%}",
        "sets (planned)": "{sets} ({planned_sets})",
        "slower": "{slower:+.1%}",
        "planned": "{planned_slower:+.1%}",
        "late": "{late:.0%}",
    }
    parts: list[Any] = [
        "k = 2T is the time of a set's copies to the host and back over F+B+W of its chunk. "
        "*Slower* is against no offload in the same round, beside the plan's simulation; *sets* is "
        "the peak on any rank, counted in the run and in the plan; *late* is the share of copies "
        "that compute waited for.",
    ]
    for name in dict.fromkeys(row["schedule"] for row in data["rows"]):
        chunks = CHUNKS.get(name)
        parts.append(f"## `{name}`{f', v = {chunks}' if chunks else ''}")
        parts.append(pages.table(columns, [r for r in data["rows"] if r["schedule"] == name]))
    return parts


def what(data: Row) -> str:
    """What was run."""
    return (
        f"{data['pp']} gloo ranks, {data['microbatches']} microbatches, passes of "
        f"{data['pass_ms']:g} ms, policy `{data['policy']}`, median of {data['repeats']} "
        "alternating rounds"
    )


BENCHMARK = pages.Benchmark(
    "offload",
    __doc__,
    "Offloading on an emulated link",
    what,
    lambda data: [*body(data), *offload_host.section(pages.newest(data["folder"], "offload-host"))],
    lambda args: ranks(args.pp, functools.partial(run_rank, args)),
    {
        "schedules": "v-half,interleaved,po,zb-h1",
        "ks": (",".join(KS), "k = 2T, comma-separated"),
        "pp": 4,
        "microbatches": 16,
        "policy": ("single", "or dual"),
        "pass_ms": (10.0, "of one chunk's F"),
        "repeats": 5,
        "per_tensor": (False, "host time of a saved tensor (offload_host.py)"),
    },
    ("torch",),
    extend=lambda parser: parser.add_argument(
        "--against", type=Path, help="with --per-tensor: another checkout, in turn"
    ),
)


def main() -> int:
    """Run it, or the host's part alone; returns the exit status."""
    args = BENCHMARK.parser().parse_args()
    if not args.per_tensor:
        return BENCHMARK.run(args)
    pages.save(args, "offload-host", offload_host.measure(args))
    known = pages.newest(args.output, "offload")
    if known is not None:
        BENCHMARK.write(args.output, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
