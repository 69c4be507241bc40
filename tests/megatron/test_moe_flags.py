"""The MoE flags: what they mean, what is refused, and what a start says of queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.enums import Fp8Recipe

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.moe import MoE
from megatron_ext.integration.features.moe.flags import MoERequest
from megatron_ext.integration.hooks import around
from megatron_ext.integration.support import CHUNKS, require_allowed
from megatron_ext.moe.plan import LayerPlan, Strategy, candidates
from tests.support.stand_ins import megatron_args, started


def arguments(**changed: Any) -> SimpleNamespace:
    values = {
        "num_experts": 8,
        "moe_pipeline_chunks": "4",
        "moe_memory_reuse": None,
        "moe_token_dispatcher_type": "alltoall",
    }
    return megatron_args(**{**values, **changed})


def test_off_means_off() -> None:
    for changed in ({"moe_pipeline_chunks": None}, {"moe_pipeline_chunks": "off"}):
        assert MoERequest.of(arguments(**changed)) is None
    assert MoERequest.of(SimpleNamespace()) is None


@pytest.mark.parametrize("chunks", ["1", "2", "4", "8"])
@pytest.mark.parametrize("strategy", [None, "none", "s0", "s1", "s2", "s3", "s4"])
def test_what_is_asked_for(chunks: str, strategy: str | None) -> None:
    request = MoERequest.of(arguments(moe_pipeline_chunks=chunks, moe_memory_reuse=strategy))
    assert request is not None
    assert request.plans() == [LayerPlan.of(int(chunks), strategy or "none")]


def test_what_may_be_chosen() -> None:
    auto = {"moe_pipeline_chunks": "auto", "moe_memory_reuse": "auto"}
    request = MoERequest.of(arguments(**auto))
    assert request is not None and request.plans() == candidates() and len(candidates()) == 6
    request = MoERequest.of(arguments(moe_memory_reuse="auto"))
    assert request is not None and {plan.chunks for plan in request.plans()} == {4}
    # Of the flex dispatcher nothing is restored.
    request = MoERequest.of(arguments(moe_token_dispatcher_type="flex", **auto))
    assert request is not None and len(request.plans()) == 3
    assert {plan.strategy for plan in request.plans()} == {Strategy.NONE}


def _moe(**changed: Any) -> Any:
    """The feature, with layers in chunks."""
    return started(MoE, "zb-h1", args=arguments(pp_schedule="zb-h1", rank=0, **changed))


@pytest.mark.parametrize(
    ("queues", "chunks", "said"), [("1", "4", True), ("1", "1", False), ("32", "4", False)]
)
def test_one_queue_is_said(
    queues: str,
    chunks: str,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    _moe(moe_pipeline_chunks=chunks)
    lines = [r.getMessage() for r in caplog.records if "export CUDA_DEVICE" in r.getMessage()]
    assert len(lines) == said


def test_priority_is_for_experts_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(
        tp: int = 1, expert_model_parallel_size: int = 1, high_priority_stream_groups: Any = None
    ) -> Any:
        return high_priority_stream_groups

    found = around(_moe()._with_priority)(initialize)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert found(1, 2) == ["ep"]
    assert found(expert_model_parallel_size=2, high_priority_stream_groups=["ep", "dp"]) == [
        "ep",
        "dp",
    ]
    assert found(1, 2, ["dp"]) == ["dp", "ep"]
    assert found(2) is None  # no experts elsewhere
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert found(1, 2) is None


def test_recipes_with_scales_of_a_call() -> None:
    for recipe in ("blockwise", "mxfp8", "tensorwise", Fp8Recipe.blockwise):
        require_allowed(arguments(fp8="e4m3", fp8_recipe=recipe), {CHUNKS})
    require_allowed(arguments(fp8=None, fp8_recipe="delayed"), {CHUNKS})  # Megatron's defaults
    with pytest.raises(ConfigError, match="delayed FP8 scales"):
        require_allowed(arguments(fp8="e4m3", fp8_recipe=Fp8Recipe.delayed), {CHUNKS})


def test_passes_are_not_measured_while_plans_are_tried() -> None:
    """An order made for the times of one plan would run another."""
    from megatron_ext.integration.features.profile import _unmeasured

    assert not _unmeasured(arguments())
    assert _unmeasured(arguments(moe_memory_reuse="auto"))
