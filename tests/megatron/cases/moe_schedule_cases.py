"""MoE layers in chunks under every kind of schedule, with and without offload; see test_moe.

As gpt_cases.py and wgrad_cases.py, on four ranks: two pipeline stages of two expert-parallel
ranks. A case's ``moe`` is (chunks, strategy).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["MEGATRON_EXT_OFFLOAD_MIN_BYTES"] = "1"

# First: it sets Apex's kernel up before it imports Megatron.
from tests.megatron.cases import wgrad_cases
from tests.support.case_server import serve

# isort: split
from megatron_ext.integration.features.moe.layer import PipelinedMoE
from megatron_ext.integration.features.offload import measure
from megatron_ext.integration.hooks import Hooks
from megatron_ext.moe import buffers
from megatron_ext.moe.plan import LayerPlan
from megatron_ext.offload.device import CpuDevice
from tests.support.faulty_device import Faults, FaultyDevice

gpt_cases = wgrad_cases.gpt_cases
parallel_state = gpt_cases.parallel_state
local_names = gpt_cases.global_names

_SEQUENTIAL = wgrad_cases.CASES["stock/moe"]["config"]
_GROUPED = wgrad_cases.CASES["stock/te-moe"]["config"]
_TWO = {"chunks": 2}


def _case(schedule: str | None, model: str, moe: Any, **more: Any) -> dict[str, Any]:
    layers = _GROUPED if "te" in model else _SEQUENTIAL
    late = "offload" in more or "overlap" in more
    case = {"pp": 2, "m": 4, "iterations": 3 if late else 2, **more, "moe": moe}
    case["parallel"] = {"expert_model_parallel_size": 2}
    case["config"] = {**layers, "expert_model_parallel_size": 2, "moe_router_topk": 2}
    case["config"]["gradient_accumulation_fusion"] = model == "fusion"
    if case.pop("act", False):  # in chunks, none with it is s0
        case["config"] |= _ACT
    case["te"], case["te_fused"] = "te" in model, model == "te-fused"
    if schedule is not None:
        case["schedule"] = schedule
    return case


_ACT = {
    "recompute_granularity": "selective",
    "recompute_modules": ["moe_act"],
    "moe_grouped_gemm": True,
}

# What comes before the slash must equal "stock/" and what comes behind it: chunks, model; "s" where
# weight gradients are sums over chunks.
CASES: dict[str, dict[str, Any]] = {
    "stock/3": _case(None, "", (3, "none")),
    "stock/3s": _case(None, "", (3, "s4")),
    "stock/3s-te": _case(None, "te", (3, "s4")),
    "stock/3s-fusion": _case(None, "fusion", (3, "s4")),
    "stock/3-te": _case(None, "te", (3, "none")),
    "stock/3-te-fused": _case(None, "te-fused", (3, "none")),
    "stock/3-fusion": _case(None, "fusion", (3, "none")),
    "stock/3-bf16": _case(None, "", (3, "none"), bf16=True),
    "zb-h1-s4/3s": _case("zb-h1", "", (3, "s4"), overlap=True),
    "v-half-none/3": _case("v-half", "", (3, "none"), **_TWO, overlap=True),
    "zb-h1-act/3-te": _case("zb-h1", "te", (3, "none"), act=True),
    "v-zb-s2/3s-te": _case("v-zb", "te", (3, "s2"), **_TWO),
    "zb-h1-none/3-te-fused": _case("zb-h1", "te-fused", (3, "none")),
    "v-half-s3/3s-fusion": _case("v-half", "fusion", (3, "s3"), **_TWO),
    "zb-h1-s0/3-fusion": _case("zb-h1", "fusion", (3, "s0")),
    "zb-h1-none/3-bf16": _case("zb-h1", "", (3, "none"), bf16=True),
}
for _name, _schedule, _strategy, _chunks in (
    ("v-half-none-offload/3", "v-half", "none", 2),
    ("zb-h1-s1-offload/3s", "zb-h1", "s1", 1),
    ("zb-h1-s0-offload/3", "zb-h1", "s0", 1),
):
    _offload = "full"
    CASES[_name] = _case(_schedule, "", (3, _strategy), chunks=_chunks, offload=_offload)


def _faulty(*unused: Any) -> CpuDevice:
    rng = random.Random(os.getpid())
    return FaultyDevice(faults=Faults(delay=lambda _: rng.random() / 500, poison=True))


def global_names(chunk: Any) -> dict[str, Any]:
    """As gpt_cases', and experts by their number in the whole layer."""
    named = {}
    rank = parallel_state.get_expert_model_parallel_rank()
    for name, parameter in local_names(chunk).items():
        if "experts" in name:
            name = f"ep{rank}.{name}"
        named[name] = parameter
    return named


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As wgrad_cases' own, with MoE layers in chunks."""
    made: list[PipelinedMoE] = []
    hooks = Hooks(gpt_cases.Installation().hooks.version)

    class WithMoE(gpt_cases.Installation):
        def start(self, run: Any) -> None:
            super().start(run)
            hook(run.store)

    def hook(store: Any) -> None:
        if case["moe"] is not None:
            made.append(PipelinedMoE([LayerPlan.of(*case["moe"])], store, min_bytes=1))
            hooks.apply(made[0].hooks())

    patched = {"global_names": global_names, "Installation": WithMoE}
    with mock.patch.multiple(gpt_cases, **patched):
        if "schedule" not in case:
            hook(None)
        try:
            result = original_run_case(case, folder)
            left = [m.memory.engine.arena.used_bytes for m in made if m.memory is not None]
            result["extra"] = {**(result.get("extra") or {}), "left": left}
        finally:
            hooks.revert()
            for moe in made:
                moe.close()
    return result


original_run_case = gpt_cases.run_case
gpt_cases.run_case = run_case

if __name__ == "__main__":
    with mock.patch.object(measure, "device_for", _faulty):
        with mock.patch.object(buffers, "device_for", _faulty):
            serve(CASES, gpt_cases.rank_main, gpt_cases.WORLD)
