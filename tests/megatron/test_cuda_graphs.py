"""``--cuda-graph-impl`` with a schedule: what is accepted, and in which order it captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule.cuda_graphs import capture_order, require_graphs
from megatron_ext.schedule import GENERATORS, NAMES, generate, lower
from tests.support.graphs import GraphRecord


def run_of(**args: Any) -> Run:
    request = SimpleNamespace(name="NAME")
    return Run(SimpleNamespace(**args), "0.19.0", request=request)  # type: ignore[arg-type]


@pytest.mark.parametrize("p, m, chunks", [(2, 4, 1), (4, 8, 1), (2, 6, 2), (4, 8, 2), (4, 8, 3)])
def test_the_order_is_stocks_for_stocks_schedules(p: int, m: int, chunks: int) -> None:
    """Where ours is stock's schedule, so is the order of the graphs."""
    schedule = lower(generate("1f1b" if chunks == 1 else "interleaved", p, m, chunks))
    table = get_schedule_table(m, chunks, p)
    for rank, row in enumerate(schedule.ranks):
        warmup = p - rank - 1 if chunks == 1 else 2 * (p - rank - 1) + (chunks - 1) * p
        stock = convert_schedule_table_to_order(min(warmup, m * chunks), chunks, table)
        assert capture_order(row, schedule.placement) == stock


@pytest.mark.parametrize("kind", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", NAMES)
def test_only_w_is_refused(name: str, kind: str) -> None:
    splits = GENERATORS[name].split_backward
    if splits:
        with pytest.raises(ConfigError, match=f"{kind}: a captured backward pass computes weight"):
            require_graphs(run_of(cuda_graph_impl=kind), splits)
    else:
        require_graphs(run_of(cuda_graph_impl=kind), splits)


@pytest.mark.parametrize(
    "flag", ["pp_profile_steps", "pp_offload", "pp_cheap_recompute", "pp_post_validation"]
)
def test_flags_of_ours_that_change_passes(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} does not support"):
        require_graphs(run_of(cuda_graph_impl="local", **{flag: 1}), False)


def test_a_whole_iteration_is_refused() -> None:
    for args in ({"cuda_graph_impl": "full_iteration"}, {
        "cuda_graph_impl": "local", "cuda_graph_scope": ["CudaGraphScope.full_iteration"]
    }):  # fmt: skip
        with pytest.raises(ConfigError, match="CUDA graphs of a full iteration"):
            require_graphs(run_of(**args), False)
    require_graphs(run_of(cuda_graph_impl="none"), True)
    require_graphs(run_of(), True)


def test_the_stand_in_refuses_another_order() -> None:
    """So that its tests can fail."""
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    record, x = GraphRecord(layers), torch.ones(1, 2, requires_grad=True)
    layers[1](layers[0](x)).sum().backward()
    record.create_cudagraphs()
    layers[1](layers[0](x)).sum().backward()
    record.create_cudagraphs()
    layers[0](layers[1](x)).sum().backward()
    with pytest.raises(AssertionError, match="not what was recorded"):
        record.create_cudagraphs()
