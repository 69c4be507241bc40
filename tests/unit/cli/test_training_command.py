"""One form of input: plan, prove and doctor read a command after ``--`` or a line of flags."""

from __future__ import annotations

import json

import pytest

from megatron_ext.commands import doctor
from megatron_ext.commands.training_command import from_line, from_words

FLAGS = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128
--vocab-size 1000 --micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 4
--pipeline-model-parallel-size 4 --bf16"""
FAST = "--schedules 1f1b --micro-batch-sizes 1 --cheap-recompute off --offload off --no-balance"
LAUNCHERS = {
    "torchrun --nproc-per-node 4 --nnodes 4 train.py": 16,
    "torchrun --nproc_per_node=8 --nnodes=2 pretrain_gpt.py": 16,
    "python -m torch.distributed.run --nproc-per-node=8 pretrain_gpt.py": 8,
    "srun -n 32 python pretrain_gpt.py": 32,
    "srun --ntasks=4 python pretrain_gpt.py": 4,
    "srun python pretrain_gpt.py": 64,
    "torchrun --nproc-per-node gpu pretrain_gpt.py": 0,
    "python -m megatron_ext.launch pretrain_gpt": 0,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "64")
    found = from_words([*launcher.split(), *FLAGS.split()])
    assert (found.script, found.world) == (launcher.split()[-1], LAUNCHERS[launcher])
    assert found.flags == FLAGS.split()


def test_a_line_of_flags():
    assert from_line(f"{FLAGS} --world-size 16") == ("", FLAGS.split(), 16)
    assert from_line(f"torchrun --nproc-per-node 2 a.py {FLAGS}") == ("a.py", FLAGS.split(), 2)


def test_plan_reads_both_alike(run):
    words = f"{FAST} --shard-vocabulary off --json".split()
    line = json.loads(run("plan", "--from-args", f"{FLAGS} --world-size 16", *words)[1])
    command = ["torchrun", "--nproc-per-node", 16, "pretrain_gpt.py", *FLAGS.split()]
    after = json.loads(run("plan", *words, "--", *command)[1])
    assert line["chosen"] == after["chosen"]
    assert (line["chosen"]["microbatches"], line["chosen"]["layers"]) == (16, [2, 2, 2, 2])


def test_what_is_no_command(run):
    for words, text in (
        (["prove"], "give the command after --"),
        (["prove", "--", "torchrun", "--bf16"], "no training script"),
        (["prove", "--from-args", FLAGS, "--", "a.py"], "give one of them"),
        (["doctor", "--from-args", '"'], "cannot be split into words"),
        (["plan", "--from-args", "bf16"], "has no flag"),
        (["show", "1f1b", "--", "torchrun"], "takes no command after --"),
    ):
        status, out, err = run(*words)
        assert (status, out) == (2, "") and err.count("\n") == 1 and text in err, words


def test_doctor_without_torch_checks_no_command(run, monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda _: {"error": "not here"})
    _, out, _ = run("doctor", "--", "torchrun", "--nproc-per-node", "16", "a.py", *FLAGS.split())
    assert "16 ranks; not checked without torch" in out
