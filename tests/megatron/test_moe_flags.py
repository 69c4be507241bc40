"""The MoE flags: what they mean, and one sentence for everything that cannot work."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.enums import Fp8Recipe

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Conflict, Run
from megatron_ext.integration.features.moe import CONFLICTS, MoE, queues
from megatron_ext.integration.features.moe.flags import MoERequest, require_supported, stock_sets
from megatron_ext.integration.features.moe.layer import FixedPolicy, PipelinedMoE
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.hooks import around
from megatron_ext.moe.cost_file import Costs
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy
from megatron_ext.plan.moe_conflicts import ACTIVATED, CHOSEN, OFFLOADED, RESTORED, SPLIT
from tests.support.stand_ins import megatron_args, started


def arguments(**changed: Any) -> SimpleNamespace:
    values = {
        "num_experts": 8,
        "moe_pipeline_chunks": "4",
        "moe_memory_reuse": None,
        "moe_memory_budget": None,
        "moe_pipeline_costs": None,
        "moe_memory_host_budget": None,
        "moe_token_dispatcher_type": "alltoall",
        "cuda_graph_impl": "none",
        "mlp_chunks_for_training": 1,
        "recompute_modules": ["core_attn"],
    }
    return megatron_args(**{**values, **changed})


def refusal(**changed: Any) -> str:
    with pytest.raises(ConfigError) as error:
        args = arguments(**changed)
        request = MoERequest.of(args)
        assert request is not None
        request.check(args)
    text = str(error.value)
    assert "\n" not in text and len(text) < 300
    return text


def test_off_means_off() -> None:
    for changed in ({"moe_pipeline_chunks": None}, {"moe_pipeline_chunks": "off"}):
        assert MoERequest.of(arguments(**changed)) is None
    assert MoERequest.of(SimpleNamespace()) is None


@pytest.mark.parametrize("chunks", ["1", "2", "4", "8"])
@pytest.mark.parametrize("strategy", [None, "none", "s0", "s1", "s2", "s3", "s4"])
def test_what_is_asked_for(chunks: str, strategy: str | None) -> None:
    args = arguments(moe_pipeline_chunks=chunks, moe_memory_reuse=strategy)
    request = MoERequest.of(args)
    assert request == MoERequest(chunks, strategy or "none")
    request.check(args)


def test_moe_act_goes_together_with_chunks() -> None:
    """They recompute the activation function themselves; see test_moe."""
    args = arguments(recompute_granularity="selective", recompute_modules=["moe_act"])
    request = MoERequest.of(args)
    assert request is not None
    request.check(args)
    require_supported(args, "none")


def test_all_dispatchers() -> None:
    """allgather is Megatron's default."""
    for name in ("alltoall", "allgather", "flex"):
        args = arguments(moe_token_dispatcher_type=name)
        request = MoERequest.of(args)
        assert request is not None
        request.check(args)


def test_what_may_be_chosen() -> None:
    args = arguments(moe_pipeline_chunks="auto", moe_memory_budget="1.5GiB")
    request = MoERequest.of(args)
    assert request == MoERequest("auto", "none", 3 << 29)
    request.check(args)
    assert request.space().plans() == [LayerPlan(n) for n in (1, 2, 4, 8)]
    both = MoERequest.of(arguments(moe_memory_reuse="auto", moe_pipeline_chunks="auto"))
    assert both is not None and set(both.space().strategies) == set(Strategy)
    fixed = MoERequest.of(arguments(moe_memory_reuse="auto"))
    assert fixed is not None and fixed.space().chunks == (4,)


def test_budgets_that_make_no_sense() -> None:
    for wrong in ("8 apples", "0", "-1GiB", "nan"):
        assert "--moe-memory-budget" in refusal(moe_memory_reuse="auto", moe_memory_budget=wrong)


def test_costs_come_from_a_file(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text(Costs("MoE", times={4096: {STOCK: 0.5}}).dump())
    request = MoERequest.of(arguments(moe_pipeline_chunks="auto", moe_pipeline_costs=str(target)))
    assert request is not None and request.costs is not None
    assert request.costs.times == {4096: {STOCK: 0.5}}
    target.write_text("{}")
    text = refusal(moe_pipeline_chunks="auto", moe_pipeline_costs=str(target))
    assert "--moe-pipeline-costs: MoE costs" in text


def test_a_host_budget_is_for_what_is_copied() -> None:
    for strategy in ("s1", "s2", "s3"):
        request = MoERequest.of(arguments(moe_memory_reuse=strategy, moe_memory_host_budget="2GiB"))
        assert request is not None and request.host_bytes == 2 << 30
        assert request.copying() == (Strategy(strategy),)
    auto = {
        "moe_memory_reuse": "auto",
        "moe_memory_budget": "1GiB",
        "moe_memory_host_budget": "2GiB",
    }
    request = MoERequest.of(arguments(**auto))
    assert request is not None and request.copying() == tuple(Strategy)
    for changed in ({}, {"moe_memory_reuse": "s4"}, {"moe_memory_reuse": "auto"}):
        text = refusal(moe_memory_host_budget="2GiB", **changed)
        assert (
            "--moe-memory-host-budget 2GiB is for what s1 to s3 copy" in text
            and "add --moe" in text
        )
    assert "--moe-memory-budget copies nothing" in text
    assert "--moe-memory-host-budget: " in refusal(
        moe_memory_reuse="s1", moe_memory_host_budget="8 apples"
    )


def test_one_queue_leaves_out_chunks_that_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They still save memory, where a budget has to be kept; and what is fixed stays."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    auto = {"moe_pipeline_chunks": "auto", "moe_memory_reuse": "auto"}
    for changed, wanted in (
        ({}, (1, 2)),
        ({"moe_memory_budget": "1GiB"}, (1, 2, 4, 8)),
        ({"moe_pipeline_chunks": "8"}, (8,)),
    ):
        request = MoERequest.of(arguments(**{**auto, **changed}))
        assert request is not None and request.space().chunks == wanted
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    request = MoERequest.of(arguments(**auto))
    assert request is not None and request.space().chunks == (1, 2, 4, 8)


def test_megatrons_demand_becomes_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Inside, it reads 1; the process's environment, which a driver may read, stays as it is."""
    module: Any = ModuleType("megatron.training.arguments")
    module.os = os
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    with pytest.raises(AssertionError), queues.without_demand(0):
        assert module.os.environ.get("NCCL_PROTO") == "Simple"
        assert module.os.getenv("NCCL_PROTO") == "Simple"
        raise AssertionError("another demand")
    assert module.os is os and not caplog.records
    for rank in (0, 1):
        with queues.without_demand(rank):
            assert module.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
            assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "MoE layers in chunks run with 16 here" in line


def _moe() -> Any:
    """The feature, with layers in chunks."""
    return started(MoE, "zb-h1", args=arguments(pp_schedule="zb-h1", rank=0))


def test_priority_is_for_experts_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(
        tp: int = 1, expert_model_parallel_size: int = 1, high_priority_stream_groups: Any = None
    ) -> Any:
        return high_priority_stream_groups

    found = around(_moe()._with_priority)(initialize)
    monkeypatch.setattr(queues, "nccl", lambda: True)
    assert found(1, 2) == ["ep"]
    assert found(expert_model_parallel_size=2, high_priority_stream_groups=["ep", "dp"]) == [
        "ep",
        "dp",
    ]
    assert found(1, 2, ["dp"]) == ["dp", "ep"]
    assert found(2) is None  # no experts elsewhere
    monkeypatch.setattr(queues, "nccl", lambda: False)
    assert found(1, 2) is None


def test_expert_priority_goes_with_a_v() -> None:
    """Whose own hook names the ranks of the embedding in place of the script."""
    from megatron_ext.integration.features import v_placement as vee

    def initialize(tp: int = 1, get_embedding_ranks: Any = None, order: str = "") -> None:
        called.append((tp, get_embedding_ranks, order))

    called: list[Any] = []
    inner = around(started(vee.VPlacement)._initialize_model_parallel)(initialize)
    around(_moe()._with_priority)(inner)(2, get_embedding_ranks=print, order="tp-pp")
    assert called == [(2, vee._embedding_ranks, "tp-pp")]


def test_auto_restores_so_it_refuses_what_restoring_refuses() -> None:
    changed = {"moe_memory_reuse": "auto", "recompute_granularity": "full"}
    assert "--moe-memory-reuse auto does not support --recompute-granularity full" in refusal(
        **changed
    )


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_in_flight_under_stocks_schedules(pp: int, chunks: int) -> None:
    if pp == 1:
        assert stock_sets(1, chunks, 8) == [1]
        return
    sets = stock_sets(pp, chunks, 8)
    if chunks == 1:
        assert sets == [min(pp - rank, 8) for rank in range(pp)]
    else:  # warm-up passes of Megatron's interleaving, and the one that it starts with
        assert sets == [2 * (pp - rank - 1) + (chunks - 1) * pp + 1 for rank in range(pp)]


@pytest.mark.parametrize(
    ("shards", "ranks", "gathered"),
    [(None, 2, False), (1, None, False), (2, 2, False), (4, 2, True)],
)
def test_weights_in_parts(shards: int | None, ranks: int | None, gathered: bool) -> None:
    """Validated arguments have a number of parts always."""
    args = {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": ranks}
    refused = pytest.raises(ConfigError, match="weight-shards 4: all ranks gather")
    with refused if gathered else contextlib.nullcontext():
        _check(expert_tensor_parallel_num_weight_shards=shards, **args)


def test_a_model_without_experts() -> None:
    assert "--num-experts is not set" in refusal(num_experts=None)


def _wrong(rule: Conflict) -> Any:
    """A value that conflicts."""
    if rule.values:
        several = rule.flag in ("--recompute-modules", "--offload-modules")
        return ["core_attn", rule.values[0]] if several else rule.values[0]
    names = {
        "--moe-token-dispatcher-type": "flex",
        "--cuda-graph-modules": ["attn", SimpleNamespace(name="moe_router")],
        "--fp8-format": "e4m3",
        "--fp4-format": "e2m1",
    }
    numbers = {
        "--mlp-chunks-for-training": 2,
        "--cpu-offloading-num-layers": 2,
        "--expert-tensor-parallel-num-weight-shards": 8,
    }
    return names.get(rule.flag, numbers.get(rule.flag, True))


def _breaking(rule: Conflict) -> dict[str, Any]:
    """Megatron's arguments that break ``rule``, and no other."""
    beside = {"--fp8-format": {"fp8": "hybrid"}, "--fp4-format": {"fp4": "e2m1"}}
    flex = {"moe_token_dispatcher_type": "flex"} if "--moe-flex" in rule.flag else {}
    captures = rule.flag == "--cuda-graph-modules"
    graphs = {"cuda_graph_impl": "transformer_engine"} if captures else {}
    return {rule.attribute: _wrong(rule), **beside.get(rule.beside, {}), **graphs, **flex}


_rules = pytest.mark.parametrize("rule", CONFLICTS, ids=lambda r: " ".join((r.flag, *r.values)))


# Part of the feature -> flags that use it, flags that do not.
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    ACTIVATED: ({"moe_memory_reuse": "s0"}, {}),
    RESTORED: ({"moe_memory_reuse": "s3"}, {}),
    OFFLOADED: ({"moe_memory_reuse": "s1"}, {"moe_memory_reuse": "s3"}),
    CHOSEN: ({"moe_pipeline_chunks": "auto"}, {}),
    SPLIT: ({"pp_schedule": "zb-h1"}, {"pp_schedule": "1f1b"}),
}


def _check(**changed: Any) -> None:
    """As the feature does it before Megatron's validation."""
    args = arguments(**changed)
    schedule = getattr(args, "pp_schedule", None)
    request = None if schedule is None else ScheduleRequest.of(schedule)
    MoE().check(Run(args, "0.19.0", request=request))


@_rules
def test_conflicts_are_refused(rule: Conflict) -> None:
    using, allowed = PARTS[rule.only]
    with pytest.raises(ConfigError) as error:
        _check(**_breaking(rule), **using)
    text = str(error.value)
    assert rule.flag in text and rule.reason in text and "\n" not in text and len(text) < 300
    flag, value = next(iter(using.items()), ("moe_pipeline_chunks", "4"))
    assert f"--{flag.replace('_', '-')} {value}" in text.partition(" does not support ")[0]
    if rule.only:
        _check(**_breaking(rule), **allowed)


@_rules
def test_layers_are_checked_whoever_built_them(rule: Conflict) -> None:
    """A configuration has the names of the flags."""
    config = arguments(**_breaking(rule))
    using, allowed = (flags.get("moe_memory_reuse", "none") for flags in PARTS[rule.only])
    with pytest.raises(ConfigError, match="an MoE layer") as error:
        require_supported(config, using, rule.only == CHOSEN, rule.only == SPLIT)
    assert rule.flag in str(error.value) and rule.reason in str(error.value)
    require_supported(arguments(), "auto", True, True)
    if rule.only:
        require_supported(config, allowed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fp8": "e4m3", "fp8_recipe": "delayed"},
        {"cuda_graph_impl": "local"},
        {"moe_paged_stash": True},
    ],
    ids=str,
)
def test_layers_of_a_program_are_refused_when_they_are_built(wrong: dict[str, Any]) -> None:
    class Layer:
        def __init__(self, config: Any) -> None:
            self.config = config

    for hook in PipelinedMoE(FixedPolicy(LayerPlan(2))).hooks():
        if hook.target.places[0].endswith("MoELayer.__init__"):
            Layer.__init__ = hook.make(Layer.__init__)  # type: ignore[method-assign]
    Layer(arguments())
    with pytest.raises(ConfigError, match="an MoE layer in chunks does not support --"):
        Layer(arguments(**wrong))


ATTENTION: list[dict[str, Any]] = [
    {"cuda_graph_scope": ["attn"]},  # up to core_v0.17
    {"cuda_graph_scope": [SimpleNamespace(name="attn"), SimpleNamespace(name="mamba")]},
    {"cuda_graph_scope_deprecated": ["attn"], "cuda_graph_modules": []},  # since core_v0.18
    {"cuda_graph_modules": ["attn", "mlp"]},
    {"cuda_graph_modules": "attn"},  # of a configuration
]


@pytest.mark.parametrize("names", ATTENTION, ids=str)
@pytest.mark.parametrize(
    "kind", [{"cuda_graph_impl": "transformer_engine"}, {"external_cuda_graph": True}]
)
def test_graphs_of_attention_only(kind: dict[str, Any], names: dict[str, Any]) -> None:
    require_supported(arguments(**kind, **names), "auto")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({}, "of whole layers"),
        ({"cuda_graph_scope": []}, "of whole layers"),
        ({"cuda_graph_scope": "full"}, "full"),
        ({"cuda_graph_scope": ["attn", "moe"]}, "moe"),
        ({"cuda_graph_modules": "attn,moe_router,moe_preprocess"}, "moe_router moe_preprocess"),
    ],
    ids=str,
)
def test_graphs_that_hold_experts(names: dict[str, Any], found: str) -> None:
    text = refusal(cuda_graph_impl="transformer_engine", **names)
    assert f"does not support --cuda-graph-modules {found}: chunks have the sizes" in text


@pytest.mark.parametrize("strategy", ["none", "s3", "s4"])
@pytest.mark.parametrize(
    "recipe",
    [
        *({"fp8": "e4m3", "fp8_recipe": name} for name in ("blockwise", "mxfp8", "tensorwise")),
        {"fp8": "e4m3", "fp8_recipe": Fp8Recipe.blockwise},
        {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
        {"fp8": None, "fp8_recipe": "delayed"},  # Megatron's defaults
    ],
    ids=str,
)
def test_recipes_with_scales_of_a_call(recipe: dict[str, Any], strategy: str) -> None:
    args = arguments(moe_memory_reuse=strategy, **recipe)
    request = MoERequest.of(args)
    assert request is not None
    request.check(args)
    require_supported(args, strategy)
    with pytest.raises(ConfigError, match="--fp8-recipe delayed"):
        require_supported(arguments(fp8="e4m3", fp8_recipe=Fp8Recipe.delayed), strategy)
