"""Hybrid models: the stages that a layer pattern lists are the model chunks."""

from __future__ import annotations

import pytest

from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.plan.layout import spread
from tests.support.stand_ins import after_megatron, before_megatron, megatron_args


def chunks_of(schedule: str, pattern: str) -> int:
    """Model chunks of a hybrid model on two pipeline ranks, after our checks."""
    args = megatron_args(
        pp_schedule="as given",
        pipeline_model_parallel_size=2,
        hybrid_layer_pattern=pattern,
        cuda_graph_impl="none",
        micro_batch_size=1,
        global_batch_size=8,
        data_parallel_size=1,
        world_size=2,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
    )
    request = before_megatron(args, ScheduleRequest.of(schedule))
    # What Megatron derives.
    chunks = (pattern.count("|") + 1) // 2
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.pipeline_model_parallel_layout is None
    assert args.hybrid_layer_pattern == pattern
    return after_megatron(args, request).placement.chunks


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "gis-h", "po"])
def test_schedules_of_several_chunks_take_the_listed_stages(schedule: str) -> None:
    assert chunks_of(schedule, "M*|-|M|*-") == 2
    assert chunks_of(schedule, "M|*|-|M|*|-") == 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_schedules_of_one_chunk(schedule: str) -> None:
    for pattern in ("M*-M", "M*|-M", "M*-|M"):
        assert chunks_of(schedule, pattern) == 1


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "taken", "counts"),
    [
        (8, 4, None, None, (0, 0), [2, 2, 2, 2]),
        (7, 4, None, None, (0, 0), None),
        (6, 4, None, None, (1, 1), [1, 2, 2, 1]),
        (4, 2, 1, 3, (0, 0), [1, 3]),
        (4, 2, 1, 2, (0, 0), None),
        (0, 2, None, None, (0, 0), None),
        (3, 4, 0, None, (0, 0), [0, 1, 1, 1]),
    ],
)
def test_spread(
    layers: int,
    stages: int,
    first: int | None,
    last: int | None,
    taken: tuple[int, int],
    counts: list[int] | None,
) -> None:
    assert spread(layers, stages, first, last, taken) == counts
