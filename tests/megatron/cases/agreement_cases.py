"""Three ranks compare what they run with; rank 1 says that its packages are other ones.

python agreement_cases.py FOLDER      each rank writes what it ended with to FOLDER/<rank>
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.integration import ConfigError
from megatron_ext.integration.features import consistency as agreement
from tests.support.ranks import on_ranks

WORLD = 3


def rank(number: int) -> None:
    """Agree once as all ranks are, then with other packages on rank 1."""
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=WORLD
    )
    agreement.require_agreement(agreement.facts({"--pp-schedule": "v-half"}, "ab12", "0.19.0"))
    if number == 1:
        torch.__version__, megatron_ext.__version__ = "9.9", "8.8"
    try:
        agreement.require_agreement(agreement.facts({"--pp-schedule": "v-half"}, "ab12", "0.19.0"))
        said = "nothing"
    except ConfigError as error:
        said = str(error)
    (folder / str(number)).write_text(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(0 if on_ranks(WORLD, rank) else 1)
