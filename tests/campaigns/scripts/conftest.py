"""Stand-ins for srun, scontrol and the like, and how a script is run with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.waiting import PATIENCE

# What the scripts promise to their processes; recorded with each command.
RECORDED = (
    "CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF NVTE_FWD_LAYERNORM_SM_MARGIN "
    "NVTE_BWD_LAYERNORM_SM_MARGIN TORCH_NCCL_AVOID_RECORD_STREAMS NCCL_P2P_NET_CHUNKSIZE "
    "NCCL_DEBUG OMP_NUM_THREADS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED PYTHONPATH MEGATRON_LM "
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE"
)

# Records its words and environment; knows torchrun's option as a new torch does.
PYTHON = f"""#!/usr/bin/env bash
if [[ " $* " == *" torch.distributed.run --help "* ]]; then
    echo "  --numa-binding {{node,socket}}"
    exit 0
fi
{{
    echo "$(basename "$0")"
    printf '  %s\\n' "$@"
    for name in {RECORDED}; do
        if [[ -n ${{!name:-}} ]]; then echo "  env $name=${{!name}}"; fi
    done
}} >>"$RECORD"
"""

# Records its options, and runs the last task of the step.
SRUN = """#!/usr/bin/env bash
echo srun >>"$RECORD"
while [[ $1 == --* ]]; do
    case $1 in
    --ntasks=*) tasks=${1#*=} ;;
    --ntasks-per-node=*) per_node=${1#*=} ;;
    esac
    echo "  $1" >>"$RECORD"
    shift
done
export SLURM_PROCID=$((tasks - 1)) SLURM_LOCALID=$((per_node - 1))
export SLURM_NODEID=$((tasks / per_node - 1))
exec "$@"
"""

# A training run: saves what SAVED says and ends with STATUS; with WAIT it first waits for SIGUSR1.
TRAINING_SRUN = """#!/usr/bin/env bash
echo srun >>"$RECORD"
told=
trap 'told=yes' USR1
if [[ -n ${WAIT:-} ]]; then
    kill -s "$WAIT" "$PPID"
    for ((i = 0; i < 6000; i++)); do
        [[ -z $told ]] || break
        sleep 0.05
    done
    [[ -n $told ]] || exit 99
fi
mkdir -p "$CHECKPOINT_DIR"
if [[ -n ${SAVED:-} ]]; then echo "$SAVED" >"$CHECKPOINT_DIR/latest_checkpointed_iteration.txt"; fi
exit "${STATUS:-0}"
"""

SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then
    printf 'node%d\\n' 1 2
else
    echo "scontrol $*" >>"$RECORD"
fi
"""

NVIDIA_SMI = """#!/usr/bin/env bash
echo 00000000:3B:00.0
"""

NUMACTL = """#!/usr/bin/env bash
echo numactl >>"$RECORD"
while [[ $1 == --* ]]; do
    echo "  $1" >>"$RECORD"
    shift
done
exec "$@"
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the stand-ins in ``bin``, an empty checkout, and one GPU's place in sysfs."""
    programs = {"python-stub": PYTHON, "srun": SRUN, "scontrol": SCONTROL}
    programs |= {"nvidia-smi": NVIDIA_SMI, "numactl": NUMACTL}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        write_program(tmp_path / "bin" / name, text)
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "pretrain_gpt.py").touch()
    gpu = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (gpu / "local_cpulist").write_text("16-31\n")
    return tmp_path


def write_program(path: Path, text: str) -> None:
    """An executable file."""
    path.write_text(text)
    path.chmod(0o755)


def settings(folder: Path) -> dict[str, str]:
    """What a user must give, for a script that is run in ``folder``."""
    return {
        "MEGATRON_LM": str(folder / "checkout"),
        "CHECKPOINT_DIR": str(folder / "checkpoints"),
        "DATA_PATH": "mock",
        "CONTAINER_IMAGE": "none",
        "PYTHON": str(folder / "bin" / "python-stub"),
    }


def job(folder: Path) -> dict[str, str]:
    """What Slurm gives a job of two nodes beside that."""
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "64",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


@pytest.fixture
def run(workplace: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of ``scripts/`` with the stand-ins and nothing of this process's environment."""

    def run(
        script: str, *arguments: str, seconds: float = PATIENCE, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        bash = shutil.which("bash")
        assert bash is not None
        env = {
            "PATH": f"{workplace}/bin:{os.environ['PATH']}",
            "RECORD": str(workplace / "record"),
            "SYSFS": str(workplace / "sys"),
            **environment,
        }
        return subprocess.run(
            [bash, str(ROOT / "scripts" / script), *arguments],
            env=env,
            cwd=workplace,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    return run


def by_flag(text: str) -> str:
    """A record with each flag's values on the flag's line, as people read it."""
    text = re.sub(r"\n  (?!-|env |numactl)", " ", text)
    return re.sub(r"(?m)^(\S+) (?!-)", r"\1\n  ", text)


def record(folder: Path) -> str:
    """What the stand-ins were called with, with this machine's paths taken out."""
    path = folder / "record"
    text = path.read_text() if path.exists() else ""
    return text.replace(str(ROOT), "$REPO").replace(str(folder), "$TMP")
