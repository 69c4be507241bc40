"""What users put on weights, hooks and gradient buffers, under stock and ours; see test_enable."""

from __future__ import annotations

import functools
import hashlib
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.integration.errors import ConfigError
from tests.megatron.cases import gpt_cases
from tests.megatron.cases.gpt_cases import to_bytes

_MICROBATCHES = 4
_PP = {"pp": 2}


def step(models: list[Any], run: Any = None, forward_only: bool = False) -> None:
    """One call, always of the same data; of ``run`` or Megatron's function."""
    (run or get_forward_backward_func())(
        forward_step_func=gpt_cases.forward_step,
        data_iterator=gpt_cases.batches(_MICROBATCHES, False),
        model=models[0],
        num_microbatches=_MICROBATCHES,
        seq_length=gpt_cases.SEQUENCE,
        micro_batch_size=gpt_cases.BATCH,
        forward_only=forward_only,
    )


class Users:
    """A model without data parallelism, whose weights carry what its user has put there.

    Attributes:
        seen: weight -> what its hook saw, call by call.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        case = {**_PP, "config": config}
        (self.model,) = gpt_cases.bare_chunks(case, gpt_cases.config_of(case))
        self.seen: dict[str, list[Any]] = {}
        first, second, *_ = self.model.decoder.layers
        expert = first.mlp.experts.local_experts[0]
        self._tensor_hook("tensor", first.self_attention.linear_qkv.weight)
        self._tensor_hook("expert", expert.linear_fc1.weight)
        noting = functools.partial(self._note, "accumulated")
        expert.linear_fc2.weight.register_post_accumulate_grad_hook(lambda p: noting(p.grad))
        weight = second.self_attention.linear_qkv.weight
        self._node = torch.autograd.graph.get_gradient_edge(weight).node
        self._node.register_hook(lambda *_: self._note("node", weight.grad))
        self.buffer = torch.zeros_like(first.self_attention.linear_proj.weight)
        first.self_attention.linear_proj.weight.grad = self.buffer.view_as(self.buffer)

    def run(self) -> dict[str, Any]:
        """Two steps."""
        step([self.model])
        step([self.model])
        named = gpt_cases.global_names(self.model).items()
        gradients = {n: to_bytes(p.grad) for n, p in named if p.grad is not None}
        return {"seen": self.seen, "gradients": gradients, "buffer": to_bytes(self.buffer)}

    def _tensor_hook(self, name: str, weight: torch.Tensor) -> None:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            self._note(name, grad)
            return grad * 3 - 1  # of a sum it is not the sum

        weight.register_hook(hook)

    def _note(self, name: str, grad: torch.Tensor | None) -> None:
        found = None if grad is None else hashlib.sha256(to_bytes(grad)).hexdigest()
        self.seen.setdefault(name, []).append(found)


def wrapped(overlap: bool, config: Any = None, bare: Any = None) -> Any:
    """A model under Megatron's data parallelism, with the distributed optimizer's reduction."""
    if bare is None:
        case = {**_PP, "config": {}}
        config = gpt_cases.config_of(case)
        (bare,) = gpt_cases.bare_chunks(case, config)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, use_distributed_optimizer=True, bucket_size=4000
    )
    model = DistributedDataParallel(config, settings, bare)
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync
    return model


def trained(model: Any, run: Any = None) -> str:
    """The gradients of two steps; that of the second could show what the first has left."""
    for _ in range(2):
        model.zero_grad_buffer()
        step([model], run)
    found = b"".join(to_bytes(p.main_grad) for p in model.parameters())
    return hashlib.sha256(found).hexdigest()


def enabled_again() -> dict[str, str]:
    """One model under one schedule after the other, and under none."""
    found = {"stock": trained(wrapped(overlap=False))}
    megatron_ext.enable("zb-h1")
    model = wrapped(overlap=True)
    found["zb-h1"] = trained(model)
    megatron_ext.disable()
    found["disabled"] = trained(model)
    for name in ("zb-h2", "zb-h1"):
        megatron_ext.enable(name)
        found[f"{name} again"] = trained(model)
        megatron_ext.disable()
    return found


def wrapped_late() -> dict[str, str]:
    """Gradients of a model that a function of a loop's own has seen before it was wrapped, and of
    one that is wrapped once more, without and with overlapped reductions."""
    run = megatron_ext.forward_backward_func("zb-h1")
    case = {**_PP, "config": {}}
    config = gpt_cases.config_of(case)
    (bare,) = gpt_cases.bare_chunks(case, config)
    with torch.no_grad():
        step([bare], run, forward_only=True)
    kept = [wrapped(overlap=False, config=config, bare=bare)]
    texts = {"stock": trained(wrapped(overlap=False)), "evaluated before": trained(kept[0], run)}
    kept.append(wrapped(overlap=False, config=config, bare=bare))
    texts["again"] = trained(kept[1], run)
    kept.append(wrapped(overlap=True, config=config, bare=bare))
    texts["overlapped"] = _error_of(lambda: trained(kept[2], run))
    return texts


def _error_of(do: Callable[[], None]) -> str:
    try:
        do()
    except ConfigError as error:
        return str(error)
    return ""


def users_weights(case: dict[str, Any]) -> dict[str, Any]:
    """All of the above on two pipeline stages."""
    log = io.StringIO()
    logging.getLogger("megatron_ext").addHandler(logging.StreamHandler(log))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case["pp"])
    model_parallel_cuda_manual_seed(1)
    found: dict[str, Any] = {"stock": Users(case["config"]).run()}
    for name, options in case["ways"].items():
        megatron_ext.enable(**options)
        found[name] = Users(case["config"]).run()
        megatron_ext.disable()
    found |= {"again": enabled_again(), "wrapped late": wrapped_late()}
    return {**found, "log": log.getvalue()}
