"""How long a stage's activations take to the host and back beside its passes: PipeOffload's k.

k = T_o / T_c (arXiv 2503.01328, section 3.1): T_o is a set's way to the host and back, T_c the
stage's F, B and W. Up to k = 1 everything can be on the host without waiting, up to k = 2 half.
"""

from __future__ import annotations

from typing import NamedTuple

from .gpu import Gpu
from .layout import Split
from .memory import stage_bytes
from .model import Job
from .times import stage_times


class Transfer(NamedTuple):
    """One stage and one microbatch.

    Attributes:
        bytes: of its activation set.
        transfer_s: seconds to the host and back, one after the other.
        compute_s: seconds of F, B and W.
    """

    bytes: int
    transfer_s: float
    compute_s: float

    @property
    def k(self) -> float:
        """Transfer by compute time; at least this share of the passes' time the link is busy."""
        return self.transfer_s / self.compute_s

    @property
    def share(self) -> float:
        """Of the sets, what can be on the host while the link is busy all the time."""
        return min(1.0, 1 / self.k)


def transfers(job: Job, split: Split, gpu: Gpu) -> list[Transfer]:
    """Of every stage of a split; a stage without passes has no k and is not among them."""
    out = []
    for stage, times in zip(stage_bytes(job, split), stage_times(job, split, gpu)):
        size, compute = stage.sets.bytes_f_to_b, sum(times)
        if compute:
            out.append(Transfer(size, size / gpu.to_host + size / gpu.to_device, compute))
    return out


def layer_transfer(job: Job, gpu: Gpu) -> Transfer:
    """Of a stage that has all layers and neither embedding nor loss, whatever its layers are."""
    return transfers(job, Split((0, job.num_layers, 0)), gpu)[1]
