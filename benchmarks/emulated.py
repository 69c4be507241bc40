"""What benchmarks on gloo ranks of this machine share: ranks, timed steps, the executor.

A pass sleeps, so two cores are enough for many ranks; executor, messages and bookkeeping are real.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.integration.utils import gather
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule.schedule import Schedule
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


def ranks(count: int, task: Callable[[int], Any]) -> Any:
    """What ``task(rank)`` returns on rank 0 of ``count`` forked ranks in one gloo process group.

    Raises:
        SystemExit: a rank failed, and has printed why.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")

        def on_rank(rank: int) -> None:
            torch.set_num_threads(1)
            where = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=count)
            found = task(rank)
            if rank == 0:
                result.write_text(json.dumps(found))
            dist.barrier()

        if not on_ranks(count, on_rank):
            raise SystemExit(1)
        return json.loads(result.read_text())


def report_progress(*what: object) -> None:
    """Print progress on rank 0."""
    if dist.get_rank() == 0:
        print(*what, flush=True)


def timed(step: Callable[[], object]) -> float:
    """Seconds of a step: from all ranks' start to the end of the last one."""
    dist.barrier()
    started = time.perf_counter()
    step()
    return max(gather(time.perf_counter() - started))


def beside(took: list[float], simulated: float) -> dict[str, Any]:
    """Seconds of a step by simulation and of every round, their median, and how far that is off."""
    step = statistics.median(took)
    return {"simulated": simulated, "step": step, "times": took, "error": step / simulated - 1}


BESIDE = {"simulated s": "{simulated:.3f}", "median s": "{step:.3f}", "error": "{error:+.2%}"}


def execute(
    plan: Schedule,
    runner: Any,
    shape: tuple[int, ...],
    watchdog: Watchdog,
    *,
    recorder: Recorder | None = None,
    group: Any = None,
) -> Recorder:
    """One iteration of this rank under the executor, messages of ``shape``; its times and counts.

    Args:
        plan: lowered.
        runner: the stages of this rank.
        group: of the pipeline; None: all ranks.
    """
    edges = connected(group or dist.group.WORLD, "passes", plan.placement.edges, CPU)
    channel = Channel(edges, shape, torch.float32, CPU)
    recorder = recorder or Recorder(False, CPU)
    with watchdog.armed():
        Executor(plan, dist.get_rank(), runner, channel, watchdog, recorder).run()
    return recorder
