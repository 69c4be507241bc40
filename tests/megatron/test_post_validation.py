"""--pp-post-validation: which flags it refuses, and when an iteration may begin early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.feature import require_no_conflict
from megatron_ext.integration.features.post_validation import PostValidation, goes_on, rewind
from tests.campaigns import random_post_validation as script
from tests.support.stand_ins import megatron_args


def test_draws_are_repeatable_and_various() -> None:
    case = script.draw(3, 5, 12)
    assert case == script.draw(3, 5, 12) != script.draw(3, 6, 12)
    settings = {script.draw(1, n, 12).setting for n in range(60)}
    assert settings == set(script.SETTINGS)


class TestConflicts:
    args = SimpleNamespace(
        rerun_mode="disabled",
        optimizer="adam",
        num_distributed_optimizer_instances=1,
        dataloader_type="single",
        fp8=None,
    )

    def refuse(self, **given: Any) -> None:
        args = SimpleNamespace(**{**vars(self.args), **given})
        require_no_conflict(args, PostValidation.conflicts, {"": "--pp-post-validation"})

    def test_what_it_supports(self) -> None:
        self.refuse()
        self.refuse(optimizer="sgd", dataloader_type="cyclic")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"rerun_mode": "validate_results"}, "add --rerun-mode disabled"),
            ({"optimizer": "muon"}, "adam and sgd"),
            ({"fp8": "hybrid"}, "--fp8-format hybrid"),
            ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
            ({"mtp_num_layers": 1}, "--mtp-num-layers"),
            ({"dataloader_type": "external"}, "--dataloader-type"),
            ({"qk_clip": True}, "behind the optimizer"),
            ({"pp_vocab_parallel": True}, "--pp-vocab-parallel: embeddings"),
        ],
    )
    def test_what_it_refuses(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            self.refuse(**given)
        assert "--pp-post-validation does not support" in str(error.value)


class TestGoesOn:
    def goes_on(self, **given: Any) -> bool:
        args = {"curr_iteration": 8, "train_iters": 20, "iterations_to_skip": [], **given}
        return goes_on(megatron_args(**args))

    def test_the_next_iteration_follows(self) -> None:
        assert self.goes_on()
        assert self.goes_on(save_interval=9, save=None)
        assert self.goes_on(save_interval=4, save="folder", eval_interval=10, do_valid=True)

    @pytest.mark.parametrize(
        "given",
        [
            {"train_iters": 9},
            {"save": "folder", "save_interval": 3},
            {"save": "folder", "non_persistent_save_interval": 9},
            {"do_valid": True, "eval_interval": 9},
            {"exit_interval": 3},
            {"iterations_to_skip": [10]},
            {"iterations_to_skip": [9]},  # so Megatron names the same one before core_v0.17
            {"phase_transition_iterations": [9]},
            {"check_weight_hash_across_dp_replicas_interval": 9},
        ],
    )
    def test_something_comes_between(self, given: dict[str, Any]) -> None:
        assert not self.goes_on(**given)


@pytest.mark.parametrize("dropped", [False, True])
def test_documents_are_counted_in_their_own_step(
    dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose forward passes had all run ahead counted none, and the others waited for it."""
    training = SimpleNamespace(_seqlen_stats_active=False, _seqlen_stats_in_iteration=None)
    found = SimpleNamespace(resolve=lambda: ("", training, ""))
    for name, stand_in in {
        "SEQLEN_COUNT": found,
        "_metrics": list,
        "_random_states": dict,
        "_set_random_states": dict,
    }.items():
        monkeypatch.setattr(rewind, name, stand_in)

    def count(tokens: int) -> None:
        so_far = training._seqlen_stats_in_iteration
        so_far = torch.zeros(1) if so_far is None else so_far
        training._seqlen_stats_in_iteration = so_far.add_(tokens)
        training._seqlen_stats_active = True

    def consume() -> float | None:
        """Of all ranks: each waits for the others if it has counted any."""
        counted, training._seqlen_stats_active = training._seqlen_stats_active, False
        total = training._seqlen_stats_in_iteration.tolist()[0]
        training._seqlen_stats_in_iteration.zero_()
        return total if counted else None

    count(3)
    ahead = rewind.Rewind([], [])
    count(10)
    ahead.suspend()
    assert consume() == 3
    if dropped:
        ahead.undo()
        assert consume() is None
        return
    ahead.resume()
    assert consume() == 10
    rewind.Rewind([], []).suspend()
    assert consume() is None
