"""--pp-vocab-parallel: what each rank holds, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.releases import TAGS
from tests.checkout.test_checkpoints import tensors
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import version

cases = case_results("megatron.cases.vocabulary_cases", "installed", *map(version, TAGS))

BUILT = ("loop", "loop-tied", "interleaved", "vee", "vee-tied", "loop-tp", "vee-tp-tied")
SAVED = ("checkpoint", "checkpoint-tied", "checkpoint-vee-tp", "checkpoint-optimizer")
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


def test_vocabulary_that_cannot_be_shared_out(cases: Cases) -> None:
    text = cases["uneven"]["refused"]
    assert "its 1023 padded entries are no multiple of 2; pad it to 1024" in text
