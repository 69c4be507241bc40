"""A job under Slurm itself: slurmctld, slurmd and munge on loopback, real torchrun, CPU ranks."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, existing
from tests.support.waiting import wait_until

from . import cluster

pytestmark = [
    pytest.mark.version(MAIN_TAG),
    pytest.mark.skipif(
        bool(cluster.missing()),
        reason=f"needs Slurm ({', '.join(cluster.missing())} not found); on Debian and Ubuntu: "
        "apt-get install slurm-wlm munge",
    ),
]

ITERATIONS = 40


def test_stops_when_told_to_and_continues(tmp_path: Path) -> None:
    """SIGUSR1 in the middle: it saves, goes back into the queue, and trains on to the end."""
    settings = {
        "MEGATRON_EXT": str(ROOT),
        "MEGATRON_LM": str(existing(MAIN_TAG)),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "DATA_PATH": "mock",
        "CONTAINER_IMAGE": "none",
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "TRAIN_ITERS": str(ITERATIONS),
        "LOG_INTERVAL": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    model = {"GPUS_PER_NODE": 2, "PP": 2, "NUM_LAYERS": 4, "HIDDEN_SIZE": 32, "NUM_HEADS": 2}
    model |= {"SEQ_LENGTH": 16, "GLOBAL_BATCH": 4, "VOCAB_SIZE": 100}
    settings |= {name: str(value) for name, value in model.items()}
    output = tmp_path / "job.out"
    script = str(ROOT / "scripts" / "slurm" / "pretrain_gpt_v_half.sbatch")
    options = ["--parsable", "--gpus-per-node=0", f"--output={output}"]
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        cluster.running(Path(folder)) as slurm,
    ):
        number = slurm.call("sbatch", *options, script, **settings).strip()
        _wait_for(slurm, number, output, lambda: _iterations(output)[-1:] >= [2])
        slurm.call("scancel", "--signal=USR1", "--batch", number)
        _wait_for(slurm, number, output, lambda: _is_back(slurm.job(number)))
        # Slurm holds a requeued job back for two minutes, from when the last of it has ended. In
        # the very second of that end, the node would take its new start for the old one.
        slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now+3seconds")
        _wait_for(slurm, number, output, lambda: slurm.job(number)["JobState"] == "COMPLETED")
    text = output.read_text()
    assert "exiting program after receiving SIGTERM" in text
    stopped = int(re.findall(r"stopped at iteration (\d+) of", text)[0])
    assert f"restart 1 on 1 node(s), from iteration {stopped} of {ITERATIONS}" in text
    assert text.splitlines()[-1].endswith(f"finished: iteration {ITERATIONS} of {ITERATIONS}")
    assert "--pp-schedule v-half on megatron-core" in text
    # Every iteration once: none was lost, and none was made twice.
    assert _iterations(output) == list(range(1, ITERATIONS + 1))


def _is_back(job: dict[str, str]) -> bool:
    return job["Restarts"] == "1" and job["JobState"] == "PENDING"


def _iterations(output: Path) -> list[int]:
    text = output.read_text() if output.exists() else ""
    return [int(x) for x in re.findall(r"iteration +(\d+)/ +\d+ \|", text)]


def _wait_for(slurm: cluster.Cluster, number: str, output: Path, ready: Callable[[], bool]) -> None:
    """Wait for ``ready()``; that the job ends before is a failure with its output."""

    def state() -> str:
        return slurm.job(number)["JobState"]

    def said() -> str:
        text = output.read_text()[-4000:] if output.exists() else ""
        return f"the job is {state()}:\n{text}\n{slurm.logs()}"

    def ready_or_over() -> bool:
        over = state() in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
        if ready():
            return True
        assert not over, said()
        return False

    wait_until(ready_or_over, said, every=0.25)
