"""What is refused or chosen around checkpoints: decisions alone, without a training run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.checkpoint import Checkpoint, choose_formats
from tests.support.stand_ins import megatron_args, started


def arguments(**changed: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as checkpoints are concerned."""
    values: dict[str, Any] = {
        "save": "somewhere",
        "load": None,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": False,
        "non_persistent_ckpt_type": None,
        "no_save_optim": None,
        "finetune": False,
        "dist_ckpt_strictness": "assume_ok_unexpected",
        "rank": 0,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers": 8,
    }
    return megatron_args(**{**values, **changed})


def vee() -> Any:
    return started(Checkpoint, args=arguments(virtual_pipeline_model_parallel_size=2))


@pytest.mark.parametrize(
    ("changed", "on", "said"),
    [
        ({}, True, "--dist-ckpt-optim-fully-reshardable"),
        ({"dist_ckpt_optim_fully_reshardable": True}, True, None),
        ({"save": None}, False, None),
        ({"save": None, "ckpt_convert_format": "torch_dist"}, True, "fully-reshardable"),
        ({"ckpt_convert_format": "torch"}, False, None),
        ({"use_distributed_optimizer": False}, False, None),
        ({"non_persistent_ckpt_type": "local"}, False, "--non-persistent-ckpt-type local"),
    ],
)
def test_the_reshardable_optimizer_is_the_default(
    changed: dict[str, Any], on: bool, said: str | None
) -> None:
    args = arguments(**changed)
    notice = choose_formats(args)
    assert args.dist_ckpt_optim_fully_reshardable is on
    assert notice is None if said is None else said in str(notice)


def test_loading_files_by_rank_is_refused_under_v_placement() -> None:
    def loaded(kind: str) -> Any:
        return {}, "a file", False, SimpleNamespace(name=kind)

    assert vee()._load_base_checkpoint(loaded, "GLOBAL")[1] == "a file"
    with pytest.raises(ConfigError, match="A V cannot use checkpoints by rank"):
        vee()._load_base_checkpoint(loaded, "LEGACY")


def test_one_copy_of_tied_weights_is_saved() -> None:
    """Of its optimizer state, too; other parts of one tensor stay."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_ext.integration.features.v_placement import VPlacement

    def part(key: str, copy: int, number: int = 0) -> ShardedTensor:
        own = torch.zeros(2, 2)
        return ShardedTensor.from_rank_offsets(key, own, (0, number, 2), replica_id=(copy, 0, 0))

    weight, state = "embedding.weight", "optimizer.state.exp_avg.embedding.weight"
    states = [part(state, copy) for copy in range(2)]
    saved: dict[str, Any] = {
        "model0": {weight: part(weight, 0), "half": part(weight, 0, 1)},
        "model1": {"output_layer.weight": part(weight, 1), "norm": part("norm", 0)},
        "optimizer": {"by number": {n: {"exp_avg": one} for n, one in enumerate(states)}},
        "in lists": [[part("main", 0), part("other", 0)], [part("main", 1)]],
    }
    given: list[Any] = []
    started(VPlacement)._apply_saving_parallelization(
        lambda strategy, state: given.append(state), None, saved
    )
    assert given[0] is saved
    assert [list(saved[name]) for name in ("model0", "model1")] == [[weight, "half"], ["norm"]]
    assert saved["optimizer"] == {"by number": {0: {"exp_avg": states[0]}, 1: {}}}
    assert [[one.key for one in group] for group in saved["in lists"]] == [["main", "other"], []]


def test_buckets_have_no_padding_to_leave_out_while_a_state_is_made() -> None:
    """See ``test_optimizer_in_shards`` for what it is good for."""
    bucket = SimpleNamespace(numel_unpadded=64, grad_data=SimpleNamespace(numel=lambda: 128))
    buffer = SimpleNamespace(numel_unpadded=64, numel=128, buckets=[bucket])
    optimizer = SimpleNamespace(buffers=[buffer])

    def state(optimizer: Any, model: str, is_loading: bool) -> tuple[Any, ...]:
        return model, is_loading, buffer.numel_unpadded, bucket.numel_unpadded

    made = vee()._sharded_param_state(state, optimizer, "model", is_loading=True)
    assert made == ("model", True, 128, 128)
    assert (buffer.numel_unpadded, bucket.numel_unpadded) == (64, 64)
