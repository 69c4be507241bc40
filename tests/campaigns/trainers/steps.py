"""Training steps of frameworks under stock and under schedules, on two gloo ranks.

$MEGATRON_EXT_TRAINER names the framework whose checkout lies in $MEGATRON_EXT_TRAINER_PATH; without
it, the loops that stand in for frameworks run.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

import megatron_ext  # noqa: E402
from megatron_ext.integration.features.telemetry.traces import exact  # noqa: E402
from tests.campaigns.trainers.frameworks import DRIVERS, prepare  # noqa: E402
from tests.campaigns.trainers.loops import LOOPS  # noqa: E402
from tests.campaigns.trainers.model import Tiny  # noqa: E402
from tests.support.case_server import serve  # noqa: E402
from tests.support.waiting import PATIENCE  # noqa: E402

STEPS, WORLD = 3, 2
SCHEDULES: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock-interleaved": {"chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved-zb": {"schedule": "interleaved-zb", "chunks": 2},
    "v-half": {"schedule": "v-half", "chunks": 2},
}


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """Run the steps; rank 0 writes what the last rank got, and all weights."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE),
    )
    driver_class, chunks = case["driver"], case.get("chunks", 1)
    if "schedule" in case:
        megatron_ext.enable(schedule=case["schedule"])
    parallel_state.initialize_model_parallel(1, WORLD, chunks if chunks > 1 else None)
    model_parallel_cuda_manual_seed(7)
    tiny = Tiny(chunks, **driver_class.options)
    driver = driver_class(tiny)
    returned = [driver.step(number) for number in range(STEPS)]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, (exact(returned), tiny.weights()))
    if rank == 0:
        result = {"returned": every[-1][0], "weights": every[0][1] | every[1][1]}
        (folder / "result.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Serve the cases."""
    torch.set_num_threads(1)
    drivers, name = dict(LOOPS), os.environ.get("MEGATRON_EXT_TRAINER")
    if name:
        checkout = Path(os.environ["MEGATRON_EXT_TRAINER_PATH"])
        sys.path.append(str(checkout))
        prepare(name, checkout)
        drivers = {name: DRIVERS[name]}
    cases = {
        f"{framework} {schedule}": {**case, "driver": driver}
        for framework, driver in drivers.items()
        for schedule, case in SCHEDULES.items()
    }
    serve(cases, rank_main, WORLD)


if __name__ == "__main__":
    main()
