"""One form of input: plan, prove and doctor read what people have alike."""

from __future__ import annotations

import json

import pytest

from megatron_ext.commands import doctor

SIZES = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 128,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "vocab_size": 1000,
}
FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=4 --ntasks-per-node=4
MODEL_ARGS=({FLAGS.replace("--tensor-model-parallel-size 4", "")})
if [ -z "$TP" ]; then TP=$SLURM_GPUS_PER_NODE; fi
srun python pretrain_gpt.py "${{MODEL_ARGS[@]}} --tensor-model-parallel-size $TP --bf16 "$@"
""".replace('"${MODEL_ARGS[@]} ', '"${MODEL_ARGS[@]}" ')
FORMS = {
    "line": f"torchrun --nproc-per-node 16 pretrain_gpt.py {FLAGS} --bf16",
    "train.sbatch": SCRIPT,
    "model_config.yaml": "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n"
    + "".join(f"  --{k.replace('_', '-')}: {v}\n" for k, v in SIZES.items())
    + "  --bf16: true\n",
}
FAST = "--schedules 1f1b --micro-batch-sizes 1 --cheap-recompute off --offload off --no-balance"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What stands after ``--from-args`` for a form."""
    monkeypatch.delenv("TP", raising=False)

    def given(form):
        if form == "line":
            return FORMS[form]
        (tmp_path / form).write_text(FORMS[form])
        return str(tmp_path / form)

    return given


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_command(run, given, form, tmp_path, monkeypatch):
    what = given(form)
    words = f"{FAST} --world-size 16 --shard-vocabulary off --json"
    status, out, err = run("plan", "--from-args", what, *words.split())
    assert status == 0, err
    chosen = json.loads(out)["chosen"]
    assert (chosen["microbatches"], chosen["layers"]) == (16, [2, 2, 2, 2])
    # 16-bit in every form, so that the bytes are the same.
    line = json.loads(run("plan", "--from-args", FORMS["line"], *words.split())[1])["chosen"]
    assert chosen["peak_bytes"] == line["peak_bytes"]
    assert chosen["ranks"][1]["parameters"] == line["ranks"][1]["parameters"]
    prove = ("prove", "--show", "--world-size", 16, "--script", "pretrain_gpt")
    status, out, err = run(*prove, "--from-args", what)
    assert status == 0, err
    assert out.startswith(
        "given: TP 4, PP 4, layers 8, hidden 512, sequence 128, global batch 16; "
    )
    assert "--tensor-model-parallel-size 2 " in out.splitlines()[1] + " "
    assert ("$@" in err) == (form == "train.sbatch")
    monkeypatch.setattr(doctor, "run_probe", lambda _: {"error": "not here"})
    _, out, _ = run("doctor", "--from-args", what)
    assert "TP 4, PP 4, layers 8" in out and "no supported Megatron" not in out


def test_what_decides_and_is_not_known_is_named_everywhere(run, tmp_path, monkeypatch):
    monkeypatch.delenv("LAYERS", raising=False)
    path = tmp_path / "train.sh"
    path.write_text(f"python pretrain_gpt.py {FLAGS} --num-layers $LAYERS\n")
    for command in ("plan --pp 4", "prove --show", "doctor"):
        status, _, err = run(*command.split(), "--from-args", path)
        assert status == 2 and err.count("\n") == 1, command
        assert "LAYERS is not set in the script" in err and "LAYERS=... megatron-ext" in err
        status, _, err = run(*command.split(), "--from-args", "nothing.sh")
        assert status == 2 and "is no file, and no flag" in err


def test_a_scripts_arguments_follow_it(run, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        f'PP=$1; shift\npython pretrain_gpt.py {FLAGS} --pipeline-model-parallel-size $PP "$@"\n'
    )
    for form in ("{} 2 --bf16", "bash {} 2 --bf16", "sbatch '{}' 2 --bf16"):
        what = form.format(path)
        words = f"{FAST} --world-size 8 --shard-vocabulary off --json"
        found = json.loads(run("plan", "--from-args", what, *words.split())[1])["chosen"]
        assert found["layers"] == [4, 4]
        status, out, _ = run("prove", "--show", "--script", "pretrain_gpt", "--from-args", what)
        assert status == 0 and "PP 2, " in out
    for command in ("plan", "prove --show", "doctor"):
        status, _, err = run(*command.split(), "--from-args", path)
        assert status == 2 and "$1: the arguments of the script are not known" in err
        assert "--from-args 'SCRIPT ARGUMENTS'" in err


def test_ranks_in_the_line_are_those_of_plan(run, monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda _: {"error": "not here"})
    line = f"{FLAGS} --world-size 64"
    status, out, _ = run("prove", "--show", "--script", "pretrain_gpt", "--from-args", line)
    assert status == 0 and out.splitlines()[0].endswith("; 64 ranks")
    assert "--world-size" not in out
    assert "64 ranks" in (found := run("doctor", "--from-args", line)[1]) and "has --w" not in found


def test_doctor_names_flags_that_no_megatron_has(run, monkeypatch):
    facts = {"torch": {"error": "none", "devices": [{}] * 8}}
    monkeypatch.setattr(doctor, "run_probe", lambda _: facts)
    line = f"torchrun --nproc-per-node 12 pretrain_gpt.py {FLAGS} --num-layer 4"
    _, out, _ = run("doctor", "--from-args", line)
    assert "no supported Megatron has --num-layer; did you mean --num-layers?" in out
    assert "12 ranks, but 8 devices here" in out
