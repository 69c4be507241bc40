"""A prelude of ``prove``'s ranks: a frozen parameter, and a resumption that loses what it should
load: the place in the learning-rate schedule, and random states."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def prepare(value: Any, rank: int, folder: Path) -> None:
    """As of ``recorder.prepare``, which it calls."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_ext.prove import recorder

    init = gpt_model.GPTModel.__init__

    def frozen(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "final_layernorm" not in name

    gpt_model.GPTModel.__init__ = frozen
    if folder.name.endswith("resumed"):
        OptimizerParamScheduler.load_state_dict = lambda self, state: None
        type(get_cuda_rng_tracker()).set_states = lambda self, states: None
    recorder.prepare(value, rank, folder)
