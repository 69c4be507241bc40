"""Hardware queues and priorities with MoE layers in chunks, in Megatron's own start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.checkouts import MAIN_TAG, environment, python_path
from tests.support.waiting import PATIENCE

# A GPU before Blackwell, two ranks of one process's make, and NCCL's options as they are asked for.
PROGRAM = """
import os, sys
from megatron_ext import cpu
cpu.install()
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state
from megatron.training.arguments import parse_args, validate_args
import megatron.training.arguments as arguments
import megatron_ext

MODEL = (
    "--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 8 --num-attention-heads 2 "
    "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --transformer-impl local "
    "--sequence-parallel --no-persist-layer-norm --num-experts 4 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --disable-bias-linear --moe-token-dispatcher-type alltoall"
).split()

def validated(*flags):
    sys.argv[1:] = [*MODEL, *flags]
    megatron_ext.apply()
    try:
        return arguments.validate_args(arguments.parse_args())
    finally:
        if not flags:
            megatron_ext.revert()

def refused():
    try:
        validated()
    except AssertionError as error:
        return "to 1" in str(error)

assert refused()
args = validated("--moe-pipeline-chunks", "4")
assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and arguments.os is os
print("validated", args.moe_pipeline_chunks)

options = []
def noted(name, configs):
    options.append((name, dict(configs.get(name, {}))))
parallel_state.get_nccl_options = noted
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
dist.is_nccl_available = lambda: True
with open(os.environ["NCCL_CONFIG"], "w") as stream:
    stream.write("ep: {max_ctas: 16}\\ntp: {cga_cluster_size: 2}\\n")
parallel_state.initialize_model_parallel(
    2, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    nccl_communicator_config_path=os.environ["NCCL_CONFIG"],
    high_priority_stream_groups=["dp_cp"], create_gloo_process_groups=False,
)
found = dict(options)
assert found["ep"] == {"max_ctas": 16, "is_high_priority_stream": True}, found
assert found["dp_cp"] == {"is_high_priority_stream": True}, found
assert found["tp"] == {"cga_cluster_size": 2}, found
parallel_state.destroy_model_parallel()
dist.is_nccl_available = lambda: False
options.clear()
parallel_state.initialize_model_parallel(
    2, expert_model_parallel_size=2, create_gloo_process_groups=False
)
assert dict(options)["ep"] == {}
megatron_ext.revert()
assert refused()  # 32 was our default; it stays
"""


@pytest.mark.matrix
def test_queues_and_priority(tmp_path: object) -> None:
    env = {**environment(), "PYTHONPATH": python_path(MAIN_TAG), "WORLD_SIZE": "4", "RANK": "0"}
    env |= {"MEGATRON_EXT_CPU_CAPABILITY": "9.0", "NCCL_CONFIG": f"{tmp_path}/nccl.yaml"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "validated 4" in done.stdout
    lines = (done.stdout + done.stderr).splitlines()
    warnings = [line for line in lines if "Megatron demands" in line]
    assert len(warnings) == 1 and "MoE layers in chunks run with 32 here" in warnings[0]
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") is None
