"""What ``plan`` answers is taken by Megatron: two ranks train on CPU tensors with its flags."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from megatron_ext import cli
from tests.support import ROOT
from tests.support.waiting import PATIENCE

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


def train(flags, log):
    """Exact losses of two steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "megatron_ext.launch", "--device", "cpu", "--loss-log", str(log)]
    command += ["pretrain_gpt", *shlex.split(f"{MODEL} {TRAINING}"), *flags]
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return [json.loads(line)["losses"] for line in log.read_text().splitlines()]


# Layers that do not divide; both ends of the model on one rank, and not; with offload.
@pytest.mark.parametrize(
    "options",
    [
        "--schedules v-half --offload off",
        "--schedules interleaved-zb --chunks 2 --memory-cap 11.3MB",
    ],
)
def test_planned_flags_train(options, tmp_path, capsys):
    plan = f"plan {MODEL} --pp 2 --gpu A100 --micro-batch-sizes 1 --cheap-recompute on --json "
    assert cli.main(shlex.split(plan + options)) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["layout"] and bool(chosen["offload"]) is ("memory-cap" in options)
    flags = shlex.split(" ".join(chosen["flags"]))
    losses = train(flags, tmp_path / "named.jsonl")
    assert len(losses) == 2
    path = tmp_path / "plan.json"
    assert cli.main(shlex.split(f"{plan}{options} --output {path}")) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    flags = shlex.split(" ".join(chosen["flags"]))
    assert str(path) in flags
    assert train(flags, tmp_path / "file.jsonl") == losses, "another order, the same numbers"
