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
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.offload_host import TITLE, run
from benchmarks.ranks import add_arguments, measured, save
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice, Direction
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import check, generate, lower, offload_pass, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.link import Link
from megatron_ext.schedule.schedule import Schedule

HERE = Path(__file__).resolve().parent

SET_BYTES = 256 << 10
MODES = ("none", "half", "full", "auto")
CHUNKS = {"po": 4, "interleaved": 4}
KS = ("0.5", "1", "1.5", "2")


@dataclass(frozen=True)
class Row:
    """One schedule, link and amount of offload.

    Attributes:
        step, least: seconds of a step over all ranks, median and minimum of the repeats.
        slower: ``step`` over that without offload in the same rounds, median of the ratios, less 1.
        planned_slower: the same in the simulation.
        sets: most on any rank, counted while it ran; ``planned_sets``: by the plan.
        moved: share of all sets that leave the device.
        late: share of RELEASE actions and first uses that found their copy unfinished.
    """

    schedule: str
    k: str
    mode: str
    step: float
    least: float
    slower: float
    planned_slower: float
    sets: int
    planned_sets: int
    moved: float
    late: float


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


class EmulatedRunner:
    """A model whose passes take time and whose sets take memory, for the executor."""

    def __init__(self, plan: Schedule, rank: int, store: ActivationStore, pause: float) -> None:
        self._plan, self._rank, self._store, self._pause = plan, rank, store, pause
        self._live: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """F."""
        time.sleep(self._pause)
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
        """B or BW; what W needs stays until then."""
        time.sleep(self._pause * (1 if split else 2))
        x, y = self._live[chunk, microbatch]
        torch.autograd.backward(y, torch.ones(1) if grad is None else grad)
        self._live[chunk, microbatch] = None
        if not split:
            self._finish((chunk, microbatch))
        gradient: torch.Tensor = x.grad
        return gradient

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        time.sleep(self._pause)
        self._finish((chunk, microbatch))

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD."""
        getattr(self._store, op.value.lower())((chunk, microbatch))

    def live_sets(self) -> int:
        """On the device."""
        return self._store.device_sets()

    def _finish(self, key: tuple[int, int]) -> None:
        del self._kept[key], self._live[key]
        self._store.finish(key)


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

    def step(self, watchdog: Watchdog) -> float:
        """Seconds of one iteration, from all ranks' start to this one's end."""
        runner = EmulatedRunner(self.plan, self._rank, self.store, self._pause)
        cpu = torch.device("cpu")
        edges = connected(dist.group.WORLD, "passes", self.plan.placement.edges, cpu)
        channel, recorder = Channel(edges, (1,), torch.float32, cpu), Recorder(False, cpu)
        dist.barrier()
        started = time.perf_counter()
        with watchdog.armed():
            Executor(self.plan, self._rank, runner, channel, watchdog, recorder).run()
        took = time.perf_counter() - started
        self.store.end_step()
        self.peak = max(self.peak, recorder.peak_sets)
        return took

    def late(self) -> tuple[int, int]:
        """Waits for unfinished copies, and occasions for them."""
        counters = self.store.engine.counters
        waits = counters.waited_releases + counters.waited_uses
        return waits, 2 * counters.offloads

    def close(self) -> None:
        """End its threads."""
        self.store.engine.close()


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """All cases on one rank; rank 0 writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.pp
    )
    watchdog = Watchdog(f"rank {rank}", 120.0)
    rows = []
    for name in args.schedules.split(","):
        for k in args.ks.split(","):
            rows += measure(name, k, rank, args, watchdog)
            if rank == 0:
                print("\n".join(map(str, rows[-len(MODES) :])), flush=True)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()


def measure(
    name: str, k: str, rank: int, args: argparse.Namespace, watchdog: Watchdog
) -> list[Row]:
    """All amounts of offload on one link, in turn."""
    way = Fraction(k) / 2
    base = generate(name, args.pp, args.microbatches, CHUNKS.get(name))
    link = Link.of(args.pp, way, policy=args.policy)
    plans = {mode: base if mode == "none" else offload_pass(base, link, mode).schedule
             for mode in MODES}  # fmt: skip
    pause = args.pass_ms / 1e3
    cases = {mode: Case(plan, rank, pause, float(way)) for mode, plan in plans.items()}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats + 1):
        for mode, case in cases.items():
            every: list[Any] = [None] * args.pp
            dist.all_gather_object(every, case.step(watchdog))
            if repeat:  # The first round warms up.
                times[mode].append(max(every))
    rows = []
    total = args.pp * base.chunks * args.microbatches
    for mode, case in cases.items():
        every = [None] * args.pp
        dist.all_gather_object(every, (case.peak, *case.late()))
        peaks, waits, occasions = zip(*every)
        ratios = [a / b for a, b in zip(times[mode], times["none"])]
        planned = simulate(plans[mode]).makespan / simulate(base).makespan
        moved = sum(case.report.offloaded_sets)
        rows.append(
            Row(
                name,
                k,
                mode,
                statistics.median(times[mode]),
                min(times[mode]),
                statistics.median(ratios) - 1,
                float(planned) - 1,
                max(peaks),
                max(case.report.peak_sets),
                moved / total,
                sum(waits) / max(1, sum(occasions)),
            )
        )
        case.close()
    return rows


def page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Offloading on an emulated link",
        "",
        f"`python -m benchmarks.offload`, {about['date']}: {about['pp']} gloo ranks, "
        f"{about['microbatches']} microbatches, passes of {about['pass_ms']:g} ms, policy "
        f"`{about['policy']}`, median of {about['repeats']} alternating rounds; "
        f"{about['machine']}, load {about['load']}. k = 2T is the time of a set's copies to the "
        "host and back over F+B+W of its chunk. *Slower* is against no offload in the same round, "
        "beside the plan's simulation; *sets* is the peak on any rank, counted in the run and in "
        "the plan; *late* is the share of copies that compute waited for.",
    ]
    for name in dict.fromkeys(row["schedule"] for row in rows):
        chunks = CHUNKS.get(name)
        lines += ["", f"## `{name}`{f', v = {chunks}' if chunks else ''}", ""]
        lines += ["| k | offload | sets leave | sets (planned) | slower | planned | late |"]
        lines += ["|--:|---|--:|--:|--:|--:|--:|"]
        for row in rows:
            if row["schedule"] == name:
                cells = (row["k"], row["mode"], f"{row['moved']:.0%}")
                cells += (f"{row['sets']} ({row['planned_sets']})", f"{row['slower']:+.1%}")
                cells += (f"{row['planned_slower']:+.1%}", f"{row['late']:.0%}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--schedules", default="v-half,interleaved,po,zb-h1")
    parser.add_argument("--ks", default=",".join(KS), help="k = 2T, comma-separated")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--policy", default="single", choices=("single", "dual"))
    parser.add_argument("--pass-ms", type=float, default=10.0, help="of one chunk's F")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--per-tensor", action="store_true", help="host time of a saved tensor (offload_host.py)"
    )
    parser.add_argument("--against", type=Path, help="with --per-tensor: another checkout, in turn")
    add_arguments(parser)
    args = parser.parse_args()
    if args.per_tensor:
        return run(args)
    found = measured(
        args, args.pp, run_rank, ("pp", "microbatches", "policy", "repeats", "pass_ms")
    )
    if found is None:
        return 1
    rows, about = found
    save(args, "offload", rows, about)
    path = args.output / "offload.md"
    host = path.read_text().partition(f"\n{TITLE}") if path.exists() else ("", "", "")
    path.write_text(page(rows, about) + "".join(host[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
