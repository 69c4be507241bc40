"""Megatron's MoE layers on gloo ranks: building one, its data, running it, and watching it.

For moe_cases.py; importing it prepares the CPU and imports Megatron.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext import cpu
from tests.megatron.cases import fake_deep_ep

cpu.install()

import torch  # noqa: E402


def _wgrad_gemm(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    Products.count += 1
    main_grad.add_(grad_output.t().matmul(x))


# Before Megatron is imported: it looks once whether DeepEP and Apex's kernel are there.
fake_deep_ep.install()
kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
kernels.wgrad_gemm_accum_fp32 = kernels.wgrad_gemm_accum_fp16 = _wgrad_gemm  # type: ignore[attr-defined]
sys.modules[kernels.__name__] = kernels

import torch.distributed as dist  # noqa: E402
from megatron.core import package_info, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe import moe_layer  # noqa: E402
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ext.integration.features.moe.layer import PipelinedMoE  # noqa: E402
from megatron_ext.integration.hooks import Hooks  # noqa: E402
from megatron_ext.moe.plan import STOCK, LayerPlan  # noqa: E402


class Products:
    """How many weight gradients Apex's kernel has computed."""

    count = 0


HIDDEN, FFN, EXPERTS, SEQUENCE, BATCH = 24, 40, 8, 13, 2

# For moe_cases.py, which must not import Megatron before this module has prepared the CPU.
__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
]


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration of the layer in ``case``."""
    dtype = case.get("dtype", torch.float32)
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": case.get("hidden", HIDDEN),
        "num_attention_heads": 2,
        "num_moe_experts": case.get("experts", EXPERTS),
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": case.get("tp", 1),
        "sequence_parallel": case.get("tp", 1) > 1,
        "expert_model_parallel_size": case.get("ep", 2),
        "expert_tensor_parallel_size": case.get("etp", 1),
    }
    if dtype is torch.float64:
        options["moe_router_dtype"] = "fp64"
    return TransformerConfig(**{**options, **case.get("config", {})})


class _Duplicated(torch.nn.Linear):
    """Transformer Engine's linear layer with the same weight on all ranks, in its interface."""

    def __init__(self, width: int, out: int, *, config: TransformerConfig, **options: Any) -> None:
        assert options["parallel_mode"] == "duplicated" and not options["is_expert"]
        super().__init__(width, out, bias=False, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def build(config: TransformerConfig) -> Any:
    """The MoE layer, with weights that depend on their global names only."""
    if config.moe_latent_size:
        moe_layer.HAVE_TE, moe_layer.TELinear = True, _Duplicated
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    ).submodules.mlp
    layer = build_module(spec, config=config) if hasattr(spec, "module") else spec(config=config)
    layer.set_layer_number(1)
    if config.moe_latent_size:
        for expert in layer.experts.local_experts:  # Megatron has grouped ones only
            for linear, dim in ((expert.linear_fc1, 1), (expert.linear_fc2, 0)):
                weight = linear.weight.detach().narrow(dim, 0, config.moe_latent_size).clone()
                linear.weight = torch.nn.Parameter(weight)
    first = layer.local_expert_indices[0]
    tp = parallel_state.get_expert_tensor_parallel_rank()
    for name, parameter in layer.named_parameters():
        parts = name.split(".")
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + first)
            parts.append(f"tp{tp}")
        seed = int.from_bytes(hashlib.sha256(".".join(parts).encode()).digest()[:7], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values * (1.0 if "router" in name else 0.3))
    return layer.to(config.params_dtype)


def data(case: dict[str, Any], config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of this rank, (sequence, batch, hidden)."""
    seed = 1000 * case.get("seed", 0) + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    sequence = case.get("sequence", SEQUENCE) + (5 * dist.get_rank() if case.get("uneven") else 0)
    shape = (sequence, BATCH, config.hidden_size)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.get("skew"):
        x = x.abs()  # with a router that likes positive numbers, all tokens go to one rank
    return x.to(config.params_dtype), dy.to(config.params_dtype)


@contextlib.contextmanager
def uneven_gather() -> Any:
    """Lets gloo gather and scatter rows of uneven sizes, as NCCL does for stock's expert-tensor
    parallelism: through all-to-alls."""

    def all_gather(outs: list[torch.Tensor], given: torch.Tensor, group: Any = None) -> None:
        if len({tuple(t.shape) for t in outs}) == 1:
            return original_gather(outs, given, group=group)
        out = given.new_empty((sum(len(t) for t in outs), *given.shape[1:]))
        every = torch.cat([given] * len(outs))
        sizes = [len(t) for t in outs]
        dist.all_to_all_single(out, every, sizes, [len(given)] * len(outs), group=group)
        for target, part in zip(outs, out.split(sizes)):
            target.copy_(part)

    def reduce_scatter(out: torch.Tensor, given: list[torch.Tensor], group: Any = None) -> None:
        parts = out.new_empty((len(given) * len(out), *out.shape[1:]))
        sizes = [len(t) for t in given]
        own = [len(out)] * len(given)
        dist.all_to_all_single(parts, torch.cat(given), own, sizes, group=group)
        out.copy_(sum(parts.split(own)))

    original_gather, original_scatter = dist.all_gather, dist.reduce_scatter
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
    try:
        yield
    finally:
        dist.all_gather, dist.reduce_scatter = original_gather, original_scatter


class Traced:
    """Notes every collective of a group inside the context: (name, bytes of the group's ranks)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __enter__(self) -> Traced:
        self._original = dist.all_to_all_single, dist.all_gather_into_tensor
        dist.all_to_all_single = self._noting("all-to-all", dist.all_to_all_single)
        dist.all_gather_into_tensor = self._noting("all-gather", dist.all_gather_into_tensor)
        return self

    def __exit__(self, *unused: object) -> None:
        dist.all_to_all_single, dist.all_gather_into_tensor = self._original

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            total = torch.tensor([given.numel() * given.element_size()])
            dist.all_reduce(total)
            self.calls.append((name, int(total), dist.get_world_size(kwargs.get("group"))))
            return original(out, given, *args, **kwargs)

        return call


def aux_losses() -> dict[str, torch.Tensor]:
    """What Megatron has noted of auxiliary losses since the last call."""
    metrics = get_moe_metrics_tracker().metrics
    found = {name: entry.values.clone() for name, entry in metrics.items()}
    metrics.clear()
    return found


def run_layer(layer: Any, x: torch.Tensor, dy: torch.Tensor, padding: Any = None) -> dict[str, Any]:
    """Forward and backward pass; output, all gradients, statistics, and how often hooks fired."""
    layer.zero_grad(set_to_none=True)
    fired: dict[str, int] = {}
    handles = []
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:

            def count(unused: Any, name: str = name) -> None:
                fired[name] = fired.get(name, 0) + 1

            handles.append(parameter.register_post_accumulate_grad_hook(count))
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x, padding_mask=padding)
    y.backward(dy)
    for handle in handles:
        handle.remove()
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    if layer.router.enable_expert_bias:
        found["bias statistics"] = layer.router.local_tokens_per_expert.clone()
        layer.router.local_tokens_per_expert.zero_()
    found |= aux_losses()
    result: dict[str, Any] = {n: None if t is None else t.clone() for n, t in found.items()}
    return {**result, "fired": fired}


def shapes(layer: Any) -> dict[str, Any]:
    """Names and shapes of a state dict."""
    return {name: getattr(value, "shape", None) for name, value in layer.state_dict().items()}


@contextlib.contextmanager
def chunked(plans: Sequence[LayerPlan] = (STOCK,), **options: Any) -> Any:
    """Megatron's MoE layers under the first of ``plans``, or by the tuner where there are more."""
    ours = PipelinedMoE(plans, **options)
    hooks = Hooks(package_info.__version__)
    hooks.apply(ours.hooks())
    try:
        yield ours
    finally:
        hooks.revert()
        ours.close()
