"""Two ranks: the losses' rank hands them over before the last rank asks for them.

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

from megatron_ext.integration.features.v_placement.relay import Relay
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule.placement import Placement
from tests.support.ranks import on_ranks
from tests.support.returned import returned, same
from tests.support.waiting import PATIENCE

WORLD = 2
LATE_SECONDS = 0.5


def rank(number: int) -> None:
    """Hand losses over; rank 1 comes late for them."""
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE),
    )
    placement, group = Placement.vee(WORLD), dist.group.WORLD
    relay, watchdog = Relay(), Watchdog("a test", 60)
    losses = [{"lm loss": torch.arange(5.0)}, returned()] if number == 0 else []
    runner = SimpleNamespace(losses=losses, num_tokens=torch.tensor(7 * (1 - number)))
    taken = folder / "taken"
    dist.barrier()
    if number == 1:
        time.sleep(LATE_SECONDS)
        taken.touch()
    relay.start(placement, group, runner, torch.device("cpu"), watchdog)
    got = relay.losses() or losses
    found = {
        "losses": got[0]["lm loss"].tolist(),
        "structure": same(got[1], returned()),
        "tokens": int(runner.num_tokens),
        "waited": taken.exists(),
    }
    del relay  # and with it whatever is still under way
    dist.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(0 if on_ranks(WORLD, rank) else 1)
