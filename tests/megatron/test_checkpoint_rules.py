"""What is refused or chosen around checkpoints: decisions alone, without a training run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoints.layout import Layout
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
    args = arguments(pp_placement="vee", virtual_pipeline_model_parallel_size=2)
    return started(Checkpoint, args=args)


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
    notice = choose_formats(args, "zb-h1", False)
    assert args.dist_ckpt_optim_fully_reshardable is on
    assert notice is None if said is None else said in str(notice)


@pytest.mark.parametrize("flags", [{}, {"save": None, "load": "somewhere"}])
def test_files_by_rank_are_refused_under_v_placement(flags: dict[str, Any]) -> None:
    args = arguments(ckpt_format="torch", **flags)
    with pytest.raises(ConfigError, match="--ckpt-format torch:.*use --ckpt-format torch_dist"):
        choose_formats(args, "v-half", True)
    assert choose_formats(args, "zb-h1", False) is None


def test_files_by_rank_are_not_made_of_a_v() -> None:
    """Stages of a V under the names of Megatron's own placement."""
    args = arguments(save=None, ckpt_convert_format="torch")
    said = "--ckpt-convert-format torch:.*; convert without --pp-schedule"
    with pytest.raises(ConfigError, match=said):
        choose_formats(args, "v-half", True)
    assert choose_formats(args, "zb-h1", False) is None


def test_a_layout_is_the_placement_not_the_schedule() -> None:
    stock = arguments()
    assert Layout.of(stock) == Layout.of(arguments(pp_placement="loop", pp_schedule="zb-h1"))
    two = {"virtual_pipeline_model_parallel_size": 2}
    layouts = {
        Layout.of(stock),
        Layout.of(arguments(**two)),
        Layout.of(arguments(pp_placement="vee", **two)),
        Layout.of(arguments(pipeline_model_parallel_size=2)),
    }
    assert len(layouts) == 4
    assert "PP 4, 2 chunks a rank in V placement" in str(vee()._layout)


def test_files_by_rank_of_another_layout_are_refused() -> None:
    plain = started(Checkpoint, "zb-h1", args=arguments())
    state = {"args": arguments(virtual_pipeline_model_parallel_size=2)}
    with pytest.raises(ConfigError, match="the format torch is for TP 1, PP 4, 2 chunks a rank"):
        plain._require_own_files(state, "a file")
    with pytest.raises(ConfigError, match="number layers by rank and chunk"):
        vee()._require_own_files(state, "a file")


def test_parameters_on_one_side_only() -> None:
    report = vee()._report_difference
    with pytest.raises(
        ConfigError, match=r"does not hold 1 .*\(output.weight\).*random initial values"
    ):
        report(arguments(), "a folder", ["output.weight"], [], "")
    with pytest.raises(ConfigError, match=r"does not hold 1 .*it was saved with X"):
        report(arguments(finetune=True), "a folder", ["a"], [], "it was saved with X")
    with pytest.raises(ConfigError, match=r"5 parameters in it are not in this one .*and 1 more"):
        report(arguments(), "a folder", [], list("abcde"), "")
    report(arguments(finetune=True), "a folder", [], ["a"], "")
    report(arguments(dist_ckpt_strictness="log_all"), "a folder", ["a"], ["b"], "")


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


def test_main_weights_of_other_weights() -> None:
    import torch

    from megatron_ext.integration.features.checkpoint.optimizer import is_of_other, main_weights

    main = torch.randn(64, generator=torch.Generator().manual_seed(1))
    small = torch.full((64,), 1e-9)  # zeros in fp16, as new biases are after a first step
    for kind in (torch.bfloat16, torch.float16):
        assert not is_of_other(main.to(kind), main)
        assert is_of_other(main.to(kind), main.roll(8))
        assert is_of_other(main.to(kind), torch.zeros(64))
        assert is_of_other(torch.zeros(64, dtype=kind), main)
        assert not is_of_other(small.to(kind), small)
    # A state that bf16 has rounded, beside weights in fp16; and one that diverged.
    assert not is_of_other(small.bfloat16().to(torch.float16), small)
    assert not is_of_other((main / 0).bfloat16(), main / 0)
    weights = [main.bfloat16(), None, main.bfloat16()]
    inner = SimpleNamespace(
        shard_float16_groups=[weights], shard_fp32_from_float16_groups=[[main, main, None]]
    )
    outer = SimpleNamespace(chained_optimizers=[inner, SimpleNamespace()])
    assert [pair[1] is main for pair in main_weights(outer)] == [True]
