"""What ``plan`` says of ``--pp-post-validation``: bytes of copies, and time."""

from __future__ import annotations

import json

import pytest

from megatron_ext import cli
from megatron_ext.plan.post_validation import FLAG

MODEL = (
    "plan --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --pp 8 --microbatches 16 --world-size 64 "
    "--micro-batch-sizes 1 --cheap-recompute off --offload off --memory-cap 100GiB "
    "--shard-vocabulary off"
)


def answer(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, object]:
    assert cli.main([*MODEL.split(), *flags.split(), "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert isinstance(chosen, dict)
    return chosen


def test_copies_are_what_a_step_changes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--schedules v-zb --bf16 --use-distributed-optimizer"
    chosen = answer(capsys, flags)
    found, ranks = chosen["post_validation"], chosen["ranks"]
    assert isinstance(found, dict) and isinstance(ranks, list)
    assert found["copies_bytes"] == max(rank["optimizer"] for rank in ranks)
    # Few sets are there while a step is in doubt, and the copies are smaller than the others.
    assert found["peak_bytes"] == chosen["peak_bytes"]
    assert found["step_ms"] < chosen["step_ms"]


def test_fp32_copies_hold_parameters_too(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = answer(capsys, "--schedules zb-h2 --sgd-momentum 0.9 --optimizer sgd")
    found, ranks = chosen["post_validation"], chosen["ranks"]
    assert isinstance(found, dict) and isinstance(ranks, list)
    assert found["copies_bytes"] == max(r["optimizer"] + r["parameters"] for r in ranks)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("v-zb", "(--pp-post-validation --rerun-mode disabled: a step takes "),
        ("1f1b", "would gain nothing"),
    ],
)
def test_in_words(capsys: pytest.CaptureFixture[str], schedule: str, words: str) -> None:
    assert cli.main([*MODEL.split(), "--bf16", "--schedules", schedule]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --fp8-format hybrid",
        "--bf16 --mtp-num-layers 1",
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
        "--optimizer muon",
    ],
)
def test_what_training_refuses_is_no_advice(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = answer(capsys, f"--schedules zb-h1 {flags}")
    wrong = " ".join(flags.rsplit("--", 1)[1:])
    assert chosen["post_validation"] is None
    assert str(chosen["no_post_validation"]).startswith(f"{FLAG} does not support --{wrong}: ")
