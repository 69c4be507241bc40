"""What a model's configuration says of a call: the shape of its messages, and who shares it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration.pipeline import groups_of_call, message_shape


def shape_of(**options: Any) -> tuple[int, ...] | None:
    """Of microbatches of two sequences of 64 tokens, with context parallelism on two ranks."""
    known = {"variable_seq_lengths": False, "sequence_parallel": False, "hidden_size": 48}
    config = SimpleNamespace(**(known | {"tensor_model_parallel_size": 4} | options))
    iteration: Any = SimpleNamespace(config=config, cp_size=2)
    return message_shape(64, 2, iteration)


def test_each_rank_sends_its_part_of_the_sequence() -> None:
    assert shape_of() == (32, 2, 48)
    assert shape_of(sequence_parallel=True) == (8, 2, 48)


@pytest.mark.parametrize(
    "option",
    [
        "variable_seq_lengths",
        "mtp_standalone",
        "enable_mhc_connections",
        "enable_hyper_connections",
    ],
)
def test_shapes_are_sent_where_they_are_not_known(option: str) -> None:
    """Among them hyper-connections, whose stages pass all residual streams on."""
    assert shape_of(**{option: True}) is None
    assert shape_of(**{option: False}) == (32, 2, 48)


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ({}, False),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, True),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, False),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "tp_only_amax_red": False}, True),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "tp_only_amax_red": True}, False),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise", "tp_only_amax_red": False}, False),
        ({"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1}, False),
        ({"gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 1}, True),
        ({"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 2}, True),
    ],
)
def test_replicas_share_a_call_where_passes_wait_for_them(
    options: dict[str, Any], wait: bool
) -> None:
    groups = {name: SimpleNamespace(size=lambda: 2) for name in ("tp", "tp_ep", "tp_dp_cp")}
    collection = SimpleNamespace(**groups, cp=SimpleNamespace(size=lambda: 1))
    found = groups_of_call("pipeline", collection, SimpleNamespace(**options))
    wanted = [groups[name] for name in ("tp", "tp_ep", *(["tp_dp_cp"] if wait else []))]
    assert found == ("pipeline", *wanted)
