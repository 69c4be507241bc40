"""--pp-vocab-parallel: what each rank holds, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.vocabulary import VocabularyParallel
from megatron_ext.integration.support import OWN_LOSS
from megatron_ext.releases import TAGS
from tests.checkout.test_checkpoints import tensors
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import version
from tests.support.grids import sampled
from tests.support.stand_ins import megatron_args

cases = case_results(
    "megatron.cases.vocabulary_cases", "installed", *(version(tag, nightly=True) for tag in TAGS)
)

BUILT = ("loop", "loop-tied", "interleaved", "vee", "vee-tied", "loop-tp", "vee-tp-tied")
# Tied weights and multi-token prediction: stock cannot save these from several pipeline ranks.
SAVED = sampled(
    [
        *("checkpoint", "checkpoint-tied", "checkpoint-vee-tp", "checkpoint-optimizer"),
        *("checkpoint-mtp", "checkpoint-vee-mtp"),
    ],
    ("checkpoint", "checkpoint-vee-tp", "checkpoint-mtp"),
)
_OPTIMIZER = "optimizer.state."


@pytest.mark.parametrize("name", BUILT)
def test_parts_are_stocks_matrices(cases: Cases, name: str) -> None:
    found = cases[name]
    assert found["names"] == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert found["equal"]


@pytest.mark.parametrize("name", BUILT)
def test_every_rank_holds_as_much(cases: Cases, name: str) -> None:
    before, after = cases[name]["before"], cases[name]["after"]
    assert any(rank["whole"] for rank in before)
    assert not any(rank["whole"] or rank["shared"] for rank in after)
    assert all(rank["marked"] for rank in after)
    mean = sum(rank["bytes"] for rank in after) / len(after)
    assert all(abs(rank["bytes"] - mean) <= 0.05 * mean for rank in after)
    tied = name.endswith("tied")
    copies = 2 if tied else 1  # stock's
    assert sum(rank["bytes"] for rank in before) >= mean * len(after)
    assert copies == 1 or sum(rank["bytes"] for rank in before) > mean * len(after)


@pytest.mark.parametrize("name", BUILT)
def test_ends_of_the_model(cases: Cases, name: str) -> None:
    after = cases[name]["after"]
    ranks = len(after) // 2  # tensor ranks of a pipeline rank
    assert [rank["embedding"] for rank in after] == [True] * ranks + [False] * ranks
    last = [True] * ranks + [False] * ranks
    assert [rank["hidden"] for rank in after] == (last if "vee" in name else last[::-1])


@pytest.mark.parametrize("name", ["passes", "passes-scattered"])
def test_passes_of_the_ends(cases: Cases, name: str) -> None:
    ranks = cases[name]["ranks"]
    for rank in ranks[: len(ranks) // 2]:
        assert rank["embedding"] and rank["gradient"]
        assert "needs the embeddings of (2, 16) tokens but has none" in rank["refused"]
    for rank in ranks[len(ranks) // 2 :]:
        assert rank["hidden"] and rank["labels"]
        assert "cannot generate text" in rank["refused"]


@pytest.mark.parametrize("name", SAVED)
def test_checkpoint_from_stock_and_back(cases: Cases, name: str) -> None:
    import torch

    found = cases[name]
    held: dict[str, dict[str, Any]] = {
        job: tensors(Path(folder)) for job, folder in found["folders"].items()
    }
    assert held["stock"].keys() == held["ours"].keys() == held["again"].keys()
    kinds = {key.startswith(_OPTIMIZER) for key in held["stock"]}
    assert kinds == ({True, False} if "optimizer" in name else {False})
    for job in ("ours", "again"):
        different = [k for k, v in held["stock"].items() if not torch.equal(v, held[job][k])]
        assert different == []
    assert found["equal"]
    assert any("mtp.layers.0." in key for key in held["ours"]) == ("mtp" in name)


def checked(**given: Any) -> Run:
    """A run with ``--pp-vocab-parallel`` after the feature's checks."""
    values: dict[str, Any] = {
        "pp_vocab_parallel": True,
        "pipeline_model_parallel_size": 4,
        "tensor_model_parallel_size": 2,
        "make_vocab_size_divisible_by": 128,
        "cuda_graph_impl": "none",
        "ckpt_format": "torch_dist",
    }
    args = megatron_args(**{**values, **given})
    run = Run(args, "0.0.0", request=ScheduleRequest.of("zb-h1"))
    feature = VocabularyParallel()
    feature.check(run)
    feature.check_derived(run)
    return run


def test_the_script_changes_whole_matrices(cases: Cases) -> None:
    """Before they are shared out: what it freezes and fills is frozen and filled on all ranks. A
    loss of its own, which wants logits, is refused."""
    said = OWN_LOSS.sentence
    assert cases["provider"]["ranks"] == [([False, True], True, said)] * 2


@pytest.mark.parametrize(
    ("before", "pp", "after", "said"),
    [
        (128, 4, 128, None),
        (128, 6, 384, "768 entries, not of 256"),
        (1, 4, 4, "8 entries, not of 2"),
    ],
)
def test_padding(before: int, pp: int, after: int, said: str | None) -> None:
    run = checked(make_vocab_size_divisible_by=before, pipeline_model_parallel_size=pp)
    assert run.args.make_vocab_size_divisible_by == after
    assert run.notices == [] if said is None else said in run.notices[0]


def test_a_fused_loss_has_no_effect() -> None:
    (text,) = checked(cross_entropy_loss_fusion=True).notices
    assert "--cross-entropy-loss-fusion has no effect" in text


def test_padding_that_is_given_stays() -> None:
    run = checked(padded_vocab_size=24, pipeline_model_parallel_size=6)
    assert run.args.make_vocab_size_divisible_by == 128
    assert run.notices == []
