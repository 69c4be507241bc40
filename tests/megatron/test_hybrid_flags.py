"""Hybrid models: the stages of a layer pattern are the model chunks, whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.layout import LayerPattern, layer_counts
from megatron_ext.plan.layout import spread
from megatron_ext.schedule import generate
from megatron_ext.schedule.io import save
from tests.support.stand_ins import after_megatron, before_megatron, megatron_args


def arguments(pattern: str | None, **changed: Any) -> SimpleNamespace:
    """Megatron's arguments of a hybrid model on two pipeline ranks, before its own validation."""
    values: dict[str, Any] = {
        "pp_schedule": "as given",
        "pipeline_model_parallel_size": 2,
        "hybrid_layer_pattern": pattern,
        "cuda_graph_impl": "none",
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "data_parallel_size": 1,
        "world_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return megatron_args(**{**values, **changed})


def accepted(
    schedule: str, pattern: str | None, **changed: Any
) -> tuple[SimpleNamespace, ScheduleRequest]:
    """Megatron's arguments after our checks, and what runs."""
    args = arguments(pattern, **changed)
    request = before_megatron(args, ScheduleRequest.of(schedule))
    # What Megatron derives.
    listed = LayerPattern.of(args)
    chunks = ((listed.listed if listed is not None else None) or 2) // 2
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.pipeline_model_parallel_layout is None
    return args, after_megatron(args, request)


def refusal(schedule: str, pattern: str | None, **changed: Any) -> str:
    """The sentence with which a combination is refused before Megatron's validation."""
    with pytest.raises(ConfigError) as error:
        before_megatron(arguments(pattern, **changed), ScheduleRequest.of(schedule))
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("schedule", ["v-half", "v-zb", "v-min", "dualpipev"])
def test_a_v_takes_the_listed_stages(schedule: str) -> None:
    args, choice = accepted(schedule, "M*|-|M|*-/MM/MM", overlap_p2p_comm=False)
    assert args.hybrid_layer_pattern == "M*|-|M|*-/MM/MM"
    assert args.overlap_p2p_comm
    assert choice.placement.is_vee()
    assert layer_counts(args, 4) == [2, 1, 1, 2]


def test_a_v_cuts_a_pattern_without_stages() -> None:
    assert accepted("v-half", "M*-MM*-M/MM")[0].hybrid_layer_pattern == "M*|-M|M*|-M/MM"
    first = accepted("v-half", "MMM*-M", decoder_first_pipeline_num_layers=3)[0]
    assert first.hybrid_layer_pattern == "MMM|*|-|M"
    assert first.decoder_first_pipeline_num_layers is None
    former = accepted("v-half", None, hybrid_override_pattern="M*-M")[0]
    assert (former.hybrid_override_pattern, former.hybrid_layer_pattern) == ("M|*|-|M", None)


def test_a_v_says_which_stages_to_list() -> None:
    text = refusal("v-half", "M*-M|MM-/MM")
    assert "--pp-schedule as given with 2 model chunks on each of 2 ranks: " in text
    assert (
        "the schedule needs 4 stages, but --hybrid-layer-pattern" in text
        and "lists 2; list 4" in text
    )
    assert text.endswith("e.g. --hybrid-layer-pattern 'M|*-|MM|M-/MM'")
    text = refusal("v-half", "M*-M-")
    assert "evenly over 4 stages, but --hybrid-layer-pattern M*-M- has 5; list" in text
    assert text.endswith("'M|*|-|M-'")
    assert "does not support --num-virtual" in refusal(
        "v-half", "M*-M", num_virtual_stages_per_pipeline_rank=2
    )
    assert "needs stages that 2 pipeline ranks can share" in refusal("v-half", "M|*|-")


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "gis-h", "po"])
def test_schedules_of_several_chunks_take_the_listed_stages(schedule: str) -> None:
    for pattern, chunks in (("M*|-|M|*-", 2), ("M|*|-|M|*|-", 3)):
        args, choice = accepted(schedule, pattern)
        assert choice.placement.chunks == chunks
        assert args.hybrid_layer_pattern == pattern
    text = refusal(schedule, "M*-M")
    assert "list a multiple of 2 stages, e.g. --hybrid-layer-pattern 'M|*|-|M'" in text
    text = refusal(schedule, "M*|-M")
    assert "needs 2 or more model chunks a rank, but --hybrid-layer-pattern M*|-M makes 1" in text
    assert "list 4 stages or more, or use another schedule: one with one chunk, e.g. zb-h" in text


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_schedules_of_one_chunk(schedule: str) -> None:
    for pattern in ("M*-M", "M*|-M", "M*-|M"):
        args, choice = accepted(schedule, pattern)
        assert (args.hybrid_layer_pattern, choice.placement.chunks) == (pattern, 1)
    text = refusal(schedule, "M*|-M|M|M")
    assert "needs 1 model chunk a rank, but --hybrid-layer-pattern M*|-M|M|M makes 2" in text
    assert "list 2 stages, or use another schedule: interleaved" in text


def test_auto_takes_what_the_pattern_allows() -> None:
    for pattern in ("M*-M", "M|*|-|M"):
        args, choice = accepted("auto", pattern)
        assert choice.placement.chunks == 2
        assert args.hybrid_layer_pattern == "M|*|-|M"
    for pattern in ("M*|-M", "M*-M-M"):
        args, choice = accepted("auto", pattern)
        assert choice.placement.chunks == 1
        assert args.hybrid_layer_pattern == pattern
        assert choice.about.endswith("only these suit this model's layers and flags")
    assert accepted("auto", "M|*|-|M|M|M")[1].placement.chunks == 3


def test_auto_takes_a_layout_too() -> None:
    for layout, chunks in (("Ett|ttL", 1), ("Et|t|t|tL", 2), ("Et||t|t|tm|L", 3)):
        args = arguments(None, num_layers=4, pipeline_model_parallel_layout=layout)
        request = before_megatron(args, ScheduleRequest.of("auto"))
        assert request.resolve(2, None, 8).placement.chunks == chunks
    # Multi-token prediction that a V cannot place.
    args = arguments(
        None, num_layers=4, mtp_num_layers=1, pipeline_model_parallel_layout="Et|t|tm|tL"
    )
    request = before_megatron(args, ScheduleRequest.of("auto"))
    assert not request.vee and request.resolve(2, None, 8).placement.chunks == 2


@pytest.mark.parametrize("schedule", ["interleaved-zb", "gis-h"])
def test_a_layout_of_one_stage_a_rank(schedule: str) -> None:
    text = refusal(schedule, None, num_layers=4, pipeline_model_parallel_layout="Ett|ttL")
    assert (
        "but --pipeline-model-parallel-layout Ett|ttL makes 1; list 4 stages or more, or use"
        in text
    )
    assert "zb-h1" in text


def test_a_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / "three.json"
    save(generate("interleaved-zb", 2, 8, 3), path)
    args, choice = accepted(str(path), "M*-M*-")
    assert args.hybrid_layer_pattern == "M|*|-|M|*|-"
    assert choice.placement.chunks == 3
    with pytest.raises(ConfigError, match="needs 3 model chunks a rank, but .* makes 2; list 6"):
        accepted(str(path), "M|*|-|M")
    with pytest.raises(ConfigError, match="spread evenly over 6 stages"):
        accepted(str(path), "M*-M")


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
