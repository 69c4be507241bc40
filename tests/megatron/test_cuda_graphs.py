"""Which CUDA graphs a schedule works with, and the order that Transformer Engine captures in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.callbacks import Step
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.cuda_graphs import CudaGraphs
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.runtime.edges import DEFAULT
from megatron_ext.schedule import generate
from megatron_ext.schedule.io import save
from tests.support.stand_ins import megatron_args

# Every way to ask for graphs of single layers: before core_v0.16, since then, after validation.
LAYERS = (
    {"enable_cuda_graph": True},
    {"external_cuda_graph": True},
    {"cuda_graph_impl": "local"},
    {"cuda_graph_impl": "transformer_engine"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
)
WHOLE = (
    {"cuda_graph_impl": "full_iteration"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="full_iteration")]},
    {"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": ["full_iteration"]},
    {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
)


def run_of(schedule: str, **flags: Any) -> Run:
    """A run of ``schedule`` with Megatron's ``flags``."""
    return Run(megatron_args(**flags), "0.19.0", request=ScheduleRequest.of(schedule))


def refusal(schedule: str, **flags: Any) -> str:
    """The sentence with which it is refused."""
    with pytest.raises(ConfigError) as error:
        CudaGraphs().check(run_of(schedule, **flags))
    return str(error.value)


@pytest.mark.parametrize("flags", LAYERS, ids=str)
def test_graphs_of_layers(flags: dict[str, Any]) -> None:
    """With whole backward passes, not with W; and messages are copied out of the graphs' pool."""
    for schedule in ("1f1b", "interleaved"):
        run = run_of(schedule, **flags)
        CudaGraphs().check(run)
        pipeline: Any = SimpleNamespace(messages=DEFAULT)
        run.pipeline = pipeline
        assert len(CudaGraphs().start(run)) == 1
        assert pipeline.messages.buffers and pipeline.messages.own
    for schedule in ("zb-h1", "v-half", "gis", "interleaved-zb", "dualpipev"):
        text = refusal(schedule, **flags)
        assert text.startswith(f"--pp-schedule {schedule} does not support --")
        assert "computes them later, in W; use 1f1b or interleaved" in text


@pytest.mark.parametrize("flags", WHOLE, ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_graphs_of_a_whole_iteration(schedule: str, flags: dict[str, Any]) -> None:
    text = refusal(schedule, **flags)
    assert "full_iteration: messages between ranks" in text


def test_no_graphs() -> None:
    for flags in ({}, {"cuda_graph_impl": "none"}, {"cuda_graph_scope": []}):
        run = run_of("v-half", **flags)
        CudaGraphs().check(run)
        assert CudaGraphs().start(run) == ()


def test_schedule_files(tmp_path: Any) -> None:
    save(generate("1f1b", 4, 8), tmp_path / "x.json")
    assert "safe in stock's orders only" in refusal(
        str(tmp_path / "x.json"), cuda_graph_impl="local"
    )


@pytest.mark.parametrize("rule", CudaGraphs.conflicts, ids=lambda rule: rule.flag)
def test_what_does_not_go_with_graphs(rule: Any) -> None:
    used = {rule.attribute: "something"}
    text = refusal("1f1b", cuda_graph_impl="local", **used)
    assert f"--cuda-graph-impl local does not support {rule.flag} something" in text
    CudaGraphs().check(run_of("1f1b", **used))


def test_transformer_engine_needs_a_step_before() -> None:
    flags = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 0}
    assert "--cuda-graph-warmup-steps 1 or more" in refusal("1f1b", **flags)
    CudaGraphs().check(run_of("1f1b", **{**flags, "cuda_graph_warmup_steps": 1}))


def step_of(name: str, rank: int, shape: tuple[int, ...] | None = (4, 1, 8)) -> Step:
    """A training step's plan on ``rank``."""
    iteration: Any = SimpleNamespace(forward_only=False)
    group: Any = SimpleNamespace(rank=lambda: rank)
    call: Any = SimpleNamespace(iteration=iteration, group=group, shape=shape)
    step = Step(call)
    step.plan = generate(name, 2, 3)
    return step


def test_order_of_transformer_engine() -> None:
    """Each rank's own, in Transformer Engine's notation; 3 microbatches on 2 ranks, which stock's
    interleaved schedule cannot run."""
    run = run_of("interleaved", cuda_graph_impl="transformer_engine")
    pipeline: Any = SimpleNamespace(messages=DEFAULT)
    run.pipeline = pipeline
    for rank, expected in (
        (0, [1, 1, 2, 2, 1, -2, -2, 2, -1, -1, -2, -1]),
        (1, [1, 1, 2, -2, 2, -2, 1, -1, -1, 2, -2, -1]),
    ):
        (callback,) = CudaGraphs().start(run)
        (hook,) = callback.hooks()
        convert = hook.make(lambda *args: pytest.fail("stock's order"))
        table = [(j, chunk) for chunk in range(2) for j in range(3)]
        with pytest.raises(ConfigError, match="3 microbatches in 2 model chunks needs a step"):
            convert(0, 2, table)
        callback.begin(step_of("interleaved", rank))
        order = convert(0, 2, table)
        assert order == expected
        assert sorted(order) == [-2] * 3 + [-1] * 3 + [1] * 3 + [2] * 3
        with pytest.raises(ConfigError, match="4 microbatches"):
            convert(0, 2, [*table, (3, 0), (3, 1)])


def test_messages_of_several_shapes() -> None:
    run = run_of("1f1b", cuda_graph_impl="local")
    pipeline: Any = SimpleNamespace(messages=DEFAULT)
    run.pipeline = pipeline
    (callback,) = CudaGraphs().start(run)
    with pytest.raises(ConfigError, match="CUDA graphs needs messages of one shape"):
        callback.begin(step_of("1f1b", 0, None))
