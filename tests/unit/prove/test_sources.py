"""Training commands from words, scripts, YAML and JSON."""

from __future__ import annotations

import pytest

from megatron_ext.prove.sources import Command, from_text, from_words

BATCH = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
export TP=2   # tensor parallelism
PP=$((2*2))
MODEL_ARGS=(
    --num-layers 32        # layers
    --hidden-size ${HIDDEN:-4096}
)
MORE="--tensor-model-parallel-size $TP \\
  --pipeline-model-parallel-size ${PP}"
MODEL_ARGS+=(--bf16)
if [ -n "$DEBUG" ]; then
  echo "starts pretrain"
fi
srun --label python -u /opt/megatron/pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $MORE --moe-layer-freq "([0]*3+[1]*58)"
"""
YAML = """ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 12   # few
  --swiglu: true
  --use-cpu: false
  # --bf16: true
  --moe-layer-freq: ([0]*1+[1]*2)
  --recompute-modules: [moe_act]
  --split: "949,50,1"
TEST_TYPE: regular
"""


def test_words_of_a_launcher():
    words = [
        "torchrun",
        "--nproc-per-node",
        "8",
        "--nnodes=2",
        "pretrain_gpt.py",
        "--bf16",
        "--lr",
        "1e-3",
    ]
    assert from_words(words) == Command("pretrain_gpt.py", ["--bf16", "--lr", "1e-3"], 16)
    assert from_words(["pretrain_gpt", "--bf16"]) == Command("pretrain_gpt", ["--bf16"], 0)
    assert from_words(["srun", "-n", "4", "python", "x.py"]).world == 4
    with pytest.raises(ValueError, match="no training script"):
        from_words(["torchrun", "--bf16"])


def test_a_batch_script():
    command = from_text(BATCH)
    assert command.script == "/opt/megatron/pretrain_gpt.py" and command.world == 32
    assert command.flags == [
        *("--num-layers", "32", "--hidden-size", "4096", "--bf16"),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"),
        *("--moe-layer-freq", "([0]*3+[1]*58)"),
    ]


def test_a_script_without_training():
    with pytest.raises(ValueError, match="no command in it"):
        from_text("#!/bin/bash\nmake all\n")


def test_a_command_in_quotes():
    text = 'CMD="python -u x/train.py --lr 1 ${MORE:-}"\nsrun -n 8 bash -c "cd /x && ${CMD}"\n'
    assert from_text(text) == Command("x/train.py", ["--lr", "1"], 8)


def test_yaml_of_a_functional_test():
    command = from_text(YAML)
    assert command.flags == [
        *("--num-layers", "12", "--swiglu", "--moe-layer-freq", "([0]*1+[1]*2)"),
        *("--recompute-modules", "moe_act", "--split", "949,50,1"),
    ]
    assert command.other


def test_yaml_with_an_anchor():
    text = "BASE_ARGS: &BASE\n  --bf16: true\n  --seed: 1\nMODEL_ARGS:\n  <<: *BASE\n  --seed: 2\n"
    more = "MODEL_ARGS_2:\n  <<: *BASE\n  --swiglu: true\n"
    assert from_text(text + more).flags == ["--bf16", "--seed", "1", "--seed", "2"]
