"""Two ranks: the losses' rank hands them over and is done with it before the last rank asks.

python relay_cases.py FOLDER      rank 1 writes what it got, rank 0 what it saw, to FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction  # noqa: F401

from megatron_ext.integration.relay import Relay
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule.placement import Placement
from tests.support.ranks import on_ranks

WORLD = 2
LATE_SECONDS = 1.5


def rank(number: int) -> None:
    """Hand losses over in each way; rank 1 comes late for each."""
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=WORLD,
        timeout=timedelta(seconds=30),
    )
    placement, group = Placement.vee(WORLD), dist.group.WORLD
    found = {}
    for way in ("waiting", "ahead"):
        relay, watchdog = Relay(), Watchdog("a test", 60)
        value = torch.arange(5.0) if number == 0 else torch.zeros(1)
        losses = [{"lm loss": value}] if number == 0 else []
        runner = SimpleNamespace(losses=losses, num_tokens=torch.tensor(7 * (1 - number)))
        taken = folder / f"{way} taken"
        dist.barrier()
        if number == 1:
            time.sleep(LATE_SECONDS)
            taken.write_text("")
        device = torch.device("cpu")
        got = relay.losses(placement, group, runner, device, watchdog, way == "ahead")
        found[way] = {
            "losses": got[0]["lm loss"].tolist(),
            "tokens": int(runner.num_tokens),
            "had to wait": taken.exists(),
        }
        relay.finish()
        found[way]["finished behind"] = taken.exists()
        del relay  # and with it whatever is still under way
        dist.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(0 if on_ranks(WORLD, rank) else 1)
