"""MoE layers of megatron-core, stock and in chunks, on gloo ranks; see test_moe.

    python moe_cases.py RESULT.pickle [CASE ...]

Forks ranks once for each case, as gpt_cases does. A case builds one of Megatron's own MoE layers
and runs it in several ways on the same weights and data; RESULT maps a case to what its ranks
found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# First: it prepares the CPU device before Megatron is imported.
from tests.megatron.cases import moe_layers
from tests.megatron.cases.moe_layers import Traced, build, chunked, config_of, data, run_layer

# isort: split
import torch
import torch.distributed as dist

from megatron_ext.integration.features.moe.layer import LayerStep
from megatron_ext.moe.plan import STOCK, LayerPlan, candidates
from tests.megatron.cases import quantized
from tests.megatron.cases.fake_deep_ep import Buffer
from tests.support.case_server import serve, write_all

STRATEGIES = ("none", "s0", "s1", "s2", "s3", "s4")


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Stock, then each (chunks, strategy) of the case's ways."""
    config = config_of(case)
    layer = build(config)
    if case.get("fp8"):
        quantized.install(layer)
    if case.get("frozen"):
        layer.experts.local_experts[0].requires_grad_(False)
    if case.get("hooked"):
        for parameter in filter(lambda one: one.requires_grad, layer.experts.parameters()):
            parameter.register_hook(lambda grad: grad * 3 - 1)  # of a sum not the sum
    x, dy = data(case, config)
    if case.get("skew"):
        # All tokens of all ranks go to the experts 0 and 1, of the first rank.
        layer.router.weight.data.fill_(-1.0)
        layer.router.weight.data[:2] = 1.0
    padding = None
    if case.get("padding"):
        padding = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
        padding[:, -3:] = True
    results: dict[Any, Any] = {"stock": run_layer(layer, x, dy, padding)}
    results["fused", 0], Buffer.calls[:] = list(Buffer.calls), []
    before = moe_layers.shapes(layer)
    with chunked(min_bytes=1) as ours:
        for chunks, strategy in case.get("ways", WAYS):
            ours.plan = LayerPlan.of(chunks, strategy)
            with moe_layers.Traced() as traced:
                results[chunks, strategy] = run_layer(layer, x, dy, padding)
            results["trace", chunks, strategy] = traced.calls
            results["fused", chunks], Buffer.calls[:] = list(Buffer.calls), []
        assert moe_layers.shapes(layer) == before
        plain = layer.moe_layer_recompute or config.moe_token_dispatcher_type == "flex"
        ours.plan = LayerPlan.of(4, "none" if plain else "s1")
        with torch.no_grad():
            results["no_grad"] = layer(x, padding_mask=padding)[0]
    return results


class Two(torch.nn.Module):
    """Two layers behind each other, with residuals."""

    def __init__(self, config: moe_layers.TransformerConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([build(config), build(config)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def counted(original: Callable[..., Any], counts: list[int], number: int) -> Callable[..., Any]:
    """``original``, counting its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[number] += 1
        return original(*args, **kwargs)

    return call


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Several steps of two microbatches under Megatron's data parallel reduction, which overlaps,
    with settings that change every step; stock, then ours."""
    steps = case["steps"]
    found: dict[str, Any] = {}
    for kind in ("stock", "ours"):
        config = config_of(case)
        module = Two(config)
        names = dict(module.named_parameters())
        ddp = moe_layers.DistributedDataParallelConfig(
            grad_reduce_in_fp32=not case.get("reduce_in_bf16"),
            overlap_grad_reduce=True,
            bucket_size=3000,
        )
        model = moe_layers.DistributedDataParallel(config, ddp, module)
        groups = model.bucket_groups + model.expert_parallel_bucket_groups
        reduced = [0] * len(groups)
        for number, group in enumerate(groups):
            group.start_grad_sync = counted(group.start_grad_sync, reduced, number)
        auto = case.get("auto") if kind == "ours" else None
        with chunked(auto or (STOCK,), min_bytes=1) as ours, Traced() as traced:
            for step, (chunks, strategy) in enumerate(steps):
                this = LayerStep([model], (dist.group.WORLD,), 1, training=True)
                ours.begin_step(this)
                if kind == "ours" and auto is None:
                    ours.plan = LayerPlan.of(chunks, strategy)
                model.zero_grad_buffer()
                moe_layers.Products.count = 0
                for microbatch in range(2):
                    x, dy = data({**case, "seed": 10 * step + microbatch}, config)
                    context = model.no_sync() if microbatch == 0 else contextlib.nullcontext()
                    with context:
                        model(x.requires_grad_()).backward(dy)
                found[kind, step, "products"] = moe_layers.Products.count
                found[kind, step, "plan"] = ours.plan.chunks, ours.plan.strategy.value
                ours.end_step(this)
                before = list(reduced)
                model.finish_grad_sync()
                found[kind, step] = {n: p.main_grad.clone() for n, p in names.items()}
                found[kind, step, "reduced"] = before, list(reduced)
                reduced[:] = [0] * len(groups)
            added = [getattr(p, "grad_added_to_main_grad", False) for p in names.values()]
            found[kind, "fused"] = sum(added)
            if ours.memory is not None:
                found["arena used"] = ours.memory.engine.arena.used_bytes
            if auto:
                found["trace"] = traced.calls
                found["chosen"] = ours.plan
    return found


WAYS = [(n, strategy) for n in (1, 2, 4) for strategy in STRATEGIES]
SOME = [(1, "s4"), (3, "none"), (3, "s0"), (3, "s1"), (3, "s2"), (3, "s3"), (3, "s4")]
QUANTIZED = [(1, "none"), (1, "s4"), (3, "none"), (3, "s0"), (3, "s3"), (3, "s4")]
AUTO_STEPS = [(0, "auto")] * 20
STEPS = [(1, "none"), (2, "s1"), (4, "s2"), (1, "s3"), (8, "s4"), (2, "none"), (4, "s0")]
_CAPACITY = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk": 3,
}
_ON_INPUT = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_apply_probs_on_input": True,
}

_FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
_ALLGATHER = {"moe_token_dispatcher_type": "allgather"}

# name -> ranks, parallel sizes, and what differs.
CASES: dict[str, dict[str, Any]] = {
    "ep2-fp64": {"world": 2, "ep": 2, "dtype": torch.float64},
    "ep2-fp32": {"world": 2, "ep": 2},
    "ep2-bf16": {"world": 2, "ep": 2, "dtype": torch.bfloat16},
    "ep4-fp64": {"world": 4, "ep": 4, "dtype": torch.float64, "ways": SOME},
    "ep4-fp32": {"world": 4, "ep": 4},
    "ep1": {"world": 2, "ep": 1, "ways": SOME},
    "ep2-dp2": {"world": 4, "ep": 2, "ways": SOME},
    "one-expert-a-rank": {"world": 4, "ep": 4, "experts": 4, "ways": SOME},
    "tp2-ep2": {"world": 4, "tp": 2, "ep": 2, "ways": SOME},
    "etp2": {"world": 2, "tp": 2, "etp": 2, "ep": 1, "ways": SOME},
    "etp2-ep2": {"world": 4, "tp": 2, "etp": 2, "ep": 2, "ways": SOME},
    "capacity": {"world": 2, "ep": 2, "ways": SOME, "config": _CAPACITY},
    "expert-bias": {"world": 2, "ep": 2, "ways": SOME, "config": _BIAS},
    "shared-experts": {
        "world": 2,
        "ep": 2,
        "ways": SOME,
        "config": {"moe_shared_expert_intermediate_size": 32},
    },
    "latent": {"world": 2, "ep": 2, "ways": SOME, "config": {"moe_latent_size": 10}},
    "probs-on-input": {"world": 2, "ep": 2, "ways": SOME, "config": _ON_INPUT},
    "allgather": {"world": 2, "ep": 2, "ways": SOME, "config": _ALLGATHER},
    "allgather-etp2-ep2": {
        "world": 4,
        "tp": 2,
        "etp": 2,
        "ep": 2,
        "ways": SOME,
        "config": _ALLGATHER,
    },
    "relu": {
        "world": 2,
        "ep": 2,
        "ways": SOME,
        "config": {"gated_linear_unit": False, "activation_func": torch.nn.functional.relu},
    },
    "odd-width": {"world": 2, "ep": 2, "ways": SOME, "hidden": 10},
    "router-fp32": {
        "world": 2,
        "ep": 2,
        "dtype": torch.bfloat16,
        "ways": SOME,
        "config": {"moe_router_dtype": "fp32"},
    },
    "skew": {"world": 4, "ep": 4, "skew": True, "ways": SOME},
    "few-tokens": {"world": 4, "ep": 4, "sequence": 1, "ways": [(8, s) for s in STRATEGIES]},
    "uneven-tokens": {"world": 4, "ep": 4, "uneven": True, "ways": SOME},
    "padding": {"world": 2, "ep": 2, "padding": True, "ways": SOME},
    "frozen": {"world": 2, "ep": 2, "frozen": True, "ways": SOME},
    "hooked": {"world": 2, "ep": 2, "hooked": True, "ways": SOME},
    "recompute": {
        "world": 2,
        "ep": 2,
        "ways": [(1, "none"), (2, "none"), (4, "none")],
        "config": _RECOMPUTED,
    },
    "fp8": {"world": 2, "ep": 2, "ways": QUANTIZED, "fp8": True},
    "fp8-recompute": {
        "world": 2,
        "ep": 2,
        "ways": [(1, "none"), (4, "none")],
        "fp8": True,
        "config": _RECOMPUTED,
    },
    "flex": {
        "world": 2,
        "ep": 2,
        "dtype": torch.bfloat16,
        "ways": [(2, "none"), (4, "none")],
        "config": {**_FLEX, "moe_shared_expert_intermediate_size": 32},
    },
    "flex-recompute": {
        "world": 2,
        "ep": 2,
        "dtype": torch.bfloat16,
        "ways": [(2, "none")],
        "config": {**_FLEX, **_RECOMPUTED},
    },
    "flex-unusual": {
        "world": 2,
        "ep": 2,
        "dtype": torch.bfloat16,
        "ways": [(2, "none")],
        "config": _FLEX,
        "frozen": True,
        "hooked": True,
        "skew": True,
    },
    "ddp-fp32": {"world": 4, "ep": 2, "run": train, "steps": STEPS},
    "ddp-bf16": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "dtype": torch.bfloat16,
    },
    "ddp-fusion": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "config": {"gradient_accumulation_fusion": True},
    },
    "auto": {
        "world": 2,
        "ep": 2,
        "run": train,
        "auto": candidates(),
        "steps": AUTO_STEPS,
        "config": {"gradient_accumulation_fusion": True},
    },
    "auto-recompute": {
        "world": 2,
        "ep": 2,
        "run": train,
        "auto": candidates("auto", "none"),
        "steps": AUTO_STEPS,
        "config": _RECOMPUTED,
    },
    "ddp-reduce-in-bf16": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "dtype": torch.bfloat16,
        "reduce_in_bf16": True,
    },
}


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    own = folder / name
    own.mkdir(exist_ok=True, parents=True)
    world = case["world"]
    dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=rank, world_size=world)
    moe_layers.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tp", 1),
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case.get("etp", 1),
    )
    moe_layers.model_parallel_cuda_manual_seed(1)
    with moe_layers.uneven_gather():
        mine = case.get("run", compare)(case)
    write_all(folder, mine)


if __name__ == "__main__":
    serve(CASES, rank_main, 2)
