"""Which layers split B and W, and when gradients count as ready; see test_wgrad_split.

As gpt_cases.py, with other layers: experts, a fused accumulation into ``main_grad`` (its CUDA
kernel replaced by the same arithmetic), stand-ins for Transformer Engine's modules, a weight that
is used twice.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.kernels import fused_kernels

# Before Megatron is imported: it looks once whether Apex's kernel is there.
sys.modules["fused_weight_gradient_mlp_cuda"] = fused_kernels()

# First: it prepares the CPU device before Megatron is imported.
from tests.megatron.cases import fake_te, gpt_cases  # noqa: E402
from tests.megatron.cases.memory_cases import waiting_bytes  # noqa: E402
from tests.support.case_server import serve  # noqa: E402

# isort: split
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402

from megatron_ext import _log  # noqa: E402
from megatron_ext.integration import split_local as local  # noqa: E402
from megatron_ext.integration.hooks import Hooks  # noqa: E402
from megatron_ext.integration.split_te import attach  # noqa: E402
from megatron_ext.integration.versions import megatron_version  # noqa: E402
from megatron_ext.runtime.wgrad import WeightGradStore  # noqa: E402

_log.set_up()  # as install does

_MOE = {
    "num_moe_experts": 8,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 32,
}
# Stock's sequential experts cannot have a bias (an in-place addition that autograd refuses).
_SEQUENTIAL = {**_MOE, "add_bias_linear": False}
_OVERLAP = {"pp": 2, "m": 4, "overlap": True, "iterations": 3}
_PARALLEL = {"pp": 2, "m": 4, "parallel": {"tensor_model_parallel_size": 2}}
# Without biases W may add to main_grad behind B's communication.
_TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "add_bias_linear": False}
_SEQUENCE = {**_TENSOR, "sequence_parallel": True}

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
    "tp-sp": {**_PARALLEL, "config": _SEQUENCE},
    "tp-fusion": {**_PARALLEL, "config": {**_TENSOR, "gradient_accumulation_fusion": True}},
    "tp-sp-fusion": {
        **_PARALLEL,
        "overlap": True,
        "config": {**_SEQUENCE, "gradient_accumulation_fusion": True},
    },
    "tp-sp-te": {**_PARALLEL, "te": True, "config": {**_SEQUENCE, "add_bias_linear": True}},
    "tp-sp-te-fused": {**_PARALLEL, "te": True, "te_fused": True, "config": _SEQUENCE},
}
# The schedules with W are many; those whose order of B and W differs most stand for all.
_RUN_UNDER: dict[str, tuple[str, ...]] = {
    "moe": ("zb-h1", "v-half"),
    "te": ("zb-h1", "v-zb"),
    "te-moe": ("v-zb",),
    "overlap": ("zb-h1", "v-half", "v-zb"),
    "overlap-moe": ("zb-h1", "v-zb"),
    "tp-sp-fusion": ("zb-h1", "v-half"),
    "tp-sp-te-fused": ("v-zb",),
}

CASES: dict[str, dict[str, Any]] = {}
for model, case in _MODELS.items():
    CASES[f"stock/{model}"] = {**case, "overlap": False}
    for schedule in _RUN_UNDER.get(model, ("zb-h1",)):
        more = {} if schedule == "zb-h1" else {"chunks": 2}
        CASES[f"{schedule}/{model}"] = {**case, "schedule": schedule, **more}
# Bytes of a set before B and between B and W: one stage, without embedding and loss.
for tp in (2, 4):
    for te in (False, True):
        CASES[f"bytes/{'te' if te else 'local'}-tp{tp}"] = {
            **{"pp": 1, "te": te, "bytes": True, "hidden": 64},
            "parallel": {"tensor_model_parallel_size": tp},
            "config": {
                **{"tensor_model_parallel_size": tp, "sequence_parallel": True},
                **{"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            },
        }
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
        submodules = experts.GroupedMLPSubmodules(**both)
        return functools.partial(experts.TEGroupedMLP, submodules=submodules)

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
            if group.is_first_batch and group.grad_reduce_handle is not None:
                return start(*args, **kwargs)  # under way: does nothing
            owed = any(store.owes(p) for store in stores for p in group.params)
            what = f"{self.when}, owed" if owed else self.when
            self.steps[-1].setdefault(id(group), []).append(what)
            return start(*args, **kwargs)

        return start_grad_sync


def count_bytes(case: dict[str, Any]) -> dict[str, Any]:
    """One stage's forward and backward pass on this rank: distinct storages that autograd keeps
    before B and the store between B and W, parameters apart; and whether the gradients of the split
    backward pass are the unsplit one's, bit for bit."""
    parallel_state.initialize_model_parallel(**case["parallel"])
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    hooks, store = Hooks(megatron_version()), WeightGradStore()
    hooks.apply([hook for hook in local.hooks(store) if "post_hook" not in hook.target.places[0]])
    try:
        config = gpt_cases.config_of(case)
        sizes = {"vocab_size": gpt_cases.VOCAB, "max_sequence_length": 64}
        ends = {"pre_process": False, "post_process": False}
        spec = gpt_cases.get_gpt_layer_local_spec()
        if case["te"]:  # their norms are in the linear modules
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
        model = gpt_cases.GPTModel(config, spec, **sizes, **ends)
        attach(model, store)
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        x = torch.randn(32 // config.tensor_model_parallel_size, 4, config.hidden_size)
        mask = torch.ones(1, 1, 32, 32).triu(1).bool()
        kept: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        def forward() -> torch.Tensor:
            model.set_input_tensor(x.clone().requires_grad_(True))
            return model(None, None, mask)

        def gradients() -> list[bytes]:
            found = [gpt_cases.to_bytes(p.grad) for p in model.parameters()]
            model.zero_grad()
            return found

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward()
        before = sum(storage.nbytes() for storage in kept.values())
        # Without these hooks, under which a weight comes back as another tensor.
        kept.clear()
        y = forward()
        weights = torch.randn_like(y)
        with store.collect("1"):
            y.backward(weights)
        waiting = waiting_bytes(store, own)
        store.run("1")
        split = gradients()
        forward().backward(weights)
        return {"before": before, "waiting": waiting, "equal": split == gradients()}
    finally:
        hooks.revert()
        parallel_state.destroy_model_parallel()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As gpt_cases' own, with stand-ins and counters around it."""
    if case.get("bytes"):
        with stand_ins(case):
            found = count_bytes(case)
        return {"losses": b"", "gradients": {}, "embedding_ranks": None, "extra": found}
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
    serve(CASES, gpt_cases.rank_main, gpt_cases.WORLD)
