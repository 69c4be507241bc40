"""Parameters of Megatron's Mamba and gated delta net layers, without the kernels that they call.

The kernels' packages need a GPU to build. Nothing is computed here: the modules are built with
Megatron's local linear layers, and stand-ins only let their constructors run.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_ext.plan.model import Job


class GatedNorm(torch.nn.Module):
    """The one weight of mamba-ssm's gated norm."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width))


def parameters(job: Job, config: Any) -> int:
    """Of one layer, its input norm included."""
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layers = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    module: torch.nn.Module
    if job.layers[0] == "M":
        mamba_mixer.HAVE_MAMBA_SSM = True
        mamba_mixer.ExtendedRMSNorm = GatedNorm
        for name in ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"):
            setattr(config, name, getattr(job, name))
        module = mamba_mixer.MambaMixer(
            *(config, mamba_mixer.MambaMixerSubmodules(**layers), job.hidden_size),
            layer_number=1,
            pg_collection=groups,
        )
    else:
        gated_delta_net.common.HAVE_FLA = True
        config.deterministic_mode = True  # its rule in plain torch
        for name in vars(job):
            if name.startswith("linear_"):
                setattr(config, name, getattr(job, name))
        module = gated_delta_net.GatedDeltaNet(
            config,
            gated_delta_net.GatedDeltaNetSubmodules(**layers, out_norm=WrappedTorchNorm),
            layer_number=1,
            bias=False,
            conv_bias=False,
            pg_collection=groups,
        )
    norm = WrappedTorchNorm(config=config, hidden_size=job.hidden_size)
    return sum(p.numel() for p in [*module.parameters(), *norm.parameters()])
