"""What ``plan`` answers is taken by Megatron: two ranks train on CPU tensors with its flags."""

from __future__ import annotations

import json
import shlex

import pytest

from megatron_ext import cli
from tests.support.checkouts import INSTALLED

MODEL = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 6 "
    "--max-position-embeddings 64 --untie-embeddings-and-output-weights --vocab-size 4095 "
    "--make-vocab-size-divisible-by 1 --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl local"
)
TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-3 --train-iters 2 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1"
)


def train(server, flags, folder):
    """Exact losses of two steps on two ranks."""
    outcome = server.run([*shlex.split(f"{MODEL} {TRAINING}"), *flags], 2, folder)
    assert outcome.status == "ok", outcome.report
    return [line["losses"] for line in outcome.losses()]


# Layers that do not divide; both ends of the model on one rank, and not; with offload.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--schedules v-half --offload off", marks=pytest.mark.matrix),
        "--schedules interleaved-zb --chunks 2 --memory-cap 9MB",
    ],
)
@pytest.mark.version(INSTALLED)
def test_planned_flags_train(options, serve, tmp_path, capsys):
    plan = f"plan {MODEL} --pp 2 --gpu A100 --micro-batch-sizes 1 --cheap-recompute on --json "
    assert cli.main(shlex.split(plan + options)) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["layout"] and bool(chosen["offload"]) is ("memory-cap" in options)
    flags = shlex.split(" ".join(chosen["flags"]))
    losses = train(serve(INSTALLED), flags, tmp_path / "named")
    assert len(losses) == 2
    path = tmp_path / "plan.json"
    assert cli.main(shlex.split(f"{plan}{options} --output {path}")) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    flags = shlex.split(" ".join(chosen["flags"]))
    assert str(path) in flags
    assert train(serve(INSTALLED), flags, tmp_path / "file") == losses, (
        "another order, the same numbers"
    )
