"""Which layers split B and W, and when gradients count as ready; see test_wgrad_split.

As gpt_cases.py, with other layers: experts, a fused accumulation into ``main_grad`` (its CUDA
kernel replaced by the same arithmetic), stand-ins for Transformer Engine's modules, a weight that
is used twice.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def _wgrad_gemm(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(grad_output.t().matmul(x))


# Before Megatron is imported: it looks once whether Apex's kernel is there.
kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
kernels.wgrad_gemm_accum_fp32 = kernels.wgrad_gemm_accum_fp16 = _wgrad_gemm  # type: ignore[attr-defined]
sys.modules[kernels.__name__] = kernels

# First: it prepares the CPU device before Megatron is imported.
from tests.megatron.cases import fake_te, gpt_cases  # noqa: E402

# isort: split
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402

_MOE = {
    "num_moe_experts": 8,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 32,
}
# Stock's sequential experts cannot have a bias (an in-place addition that autograd refuses).
_SEQUENTIAL = {**_MOE, "add_bias_linear": False}
_OVERLAP = {"pp": 2, "overlap": True, "iterations": 3}

# name -> what to run; "te": with stand-ins.
_MODELS: dict[str, dict[str, Any]] = {
    "ce": {"pp": 4, "config": {"cross_entropy_loss_fusion": True}},
    "fusion": {"pp": 4, "config": {"gradient_accumulation_fusion": True}},
    "moe": {"pp": 4, "config": _SEQUENTIAL},
    "te": {"pp": 4, "te": True},
    "te-fused": {"pp": 4, "te": True, "te_fused": True},
    "te-recompute": {"pp": 2, "te": True, "recompute": True},
    "te-moe": {"pp": 4, "te": True, "config": _MOE},
    "te-moe-fused": {"pp": 4, "te": True, "te_fused": True, "config": _MOE},
    # The output layer is used twice, and with tied weights its weight embeds tokens there too.
    "mtp": {"pp": 4, "config": {"mtp_num_layers": 1}},
    "mtp-tied": {"pp": 4, "tied": True, "config": {"mtp_num_layers": 1}},
    "overlap": _OVERLAP,
    "overlap-fusion": {**_OVERLAP, "config": {"gradient_accumulation_fusion": True}},
    "overlap-moe": {**_OVERLAP, "config": _SEQUENTIAL},
    "overlap-te-moe": {**_OVERLAP, "te": True, "config": _MOE},
}
# The schedules with W are many; those whose order of B and W differs most stand for all.
_RUN_UNDER: dict[str, tuple[str, ...]] = {
    "moe": ("zb-h1", "v-half"),
    "te": ("zb-h1", "v-zb"),
    "te-moe": ("v-zb",),
    "overlap": ("zb-h1", "v-half", "v-zb"),
    "overlap-moe": ("zb-h1", "v-zb"),
}

CASES: dict[str, dict[str, Any]] = {}
for model, case in _MODELS.items():
    CASES[f"stock/{model}"] = {**case, "overlap": False}
    for schedule in _RUN_UNDER.get(model, ("zb-h1",)):
        more = {} if schedule == "zb-h1" else {"chunks": 2}
        CASES[f"{schedule}/{model}"] = {**case, "schedule": schedule, **more}
CASES["stock/te-forward"] = {**_MODELS["te"], "forward_only": True}
CASES["zb-h1/te-forward"] = {**_MODELS["te"], "schedule": "zb-h1", "forward_only": True}


@contextlib.contextmanager
def stand_ins(case: dict[str, Any]) -> Any:
    """Megatron's local layer specification, with Transformer Engine's modules in it."""
    if not case.get("te"):
        yield
        return
    both = {"linear_fc1": fake_te.TEGroupedLinear, "linear_fc2": fake_te.TEGroupedLinear}

    def experts_builder(*unused: Any) -> Any:
        if hasattr(experts, "GroupedMLPSubmodules"):
            submodules = experts.GroupedMLPSubmodules(**both)
            return functools.partial(experts.TEGroupedMLP, submodules=submodules)
        return experts.TEGroupedMLP, MLPSubmodules(**both)  # before 0.17

    replaced = {
        "column_parallel_linear": lambda self: fake_te.TELayerNormColumnParallelLinear,
        "row_parallel_linear": lambda self: fake_te.TELinear,
        "fuse_layernorm_and_linear": lambda self: True,
        "column_parallel_layer_norm_linear": lambda self: fake_te.TELayerNormColumnParallelLinear,
        "grouped_mlp_modules": experts_builder,
    }
    with mock.patch.multiple(LocalSpecProvider, **replaced):
        with mock.patch.object(fake_te, "FUSED", case.get("te_fused", False)):
            yield


class Watch:
    """Counts, per iteration, when each bucket group is reduced."""

    def __init__(self, wrapped: list[Any], config: Any, stores: list[Any]) -> None:
        self.steps: list[dict[int, list[str]]] = [{}]
        self.when, self.groups = "passes", 0
        finalize = config.finalize_model_grads_func
        for model in wrapped:
            for group in model.bucket_groups + model.expert_parallel_bucket_groups:
                self.groups += 1
                group.start_grad_sync = self._counted(group, group.start_grad_sync, stores)

        def finalizing(*args: Any, **kwargs: Any) -> Any:
            self.when = "finalize"
            result = finalize(*args, **kwargs)
            self.when = "passes"
            self.steps.append({})
            return result

        config.finalize_model_grads_func = finalizing

    def _counted(self, group: Any, start: Any, stores: list[Any]) -> Any:
        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            owed = any(store.owes(p) for store in stores for p in group.params)
            what = f"{self.when}, owed" if owed else self.when
            self.steps[-1].setdefault(id(group), []).append(what)
            return start(*args, **kwargs)

        return start_grad_sync


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As gpt_cases' own, with stand-ins and counters around it."""
    watches: list[Watch] = []
    stores: list[Any] = []

    def build(case: dict[str, Any], config: Any) -> Any:
        wrapped, bare = original_build(case, config)
        if case.get("overlap"):
            watches.append(Watch(wrapped, config, stores))
        return wrapped, bare

    class Noting(gpt_cases.Installation):
        def start(self, run: Any) -> None:
            super().start(run)
            stores.append(run.store)

    with stand_ins(case):
        with mock.patch.multiple(gpt_cases, build=build, Installation=Noting):
            result = original_run_case(case, folder)
    steps = [list(step.values()) for watch in watches for step in watch.steps if step]
    result["extra"] = {"steps": steps, "groups": sum(watch.groups for watch in watches)}
    return result


original_build, original_run_case = gpt_cases.build, gpt_cases.run_case
gpt_cases.run_case = run_case


if __name__ == "__main__":
    gpt_cases.serve(CASES, gpt_cases.rank_main, gpt_cases.WORLD)
