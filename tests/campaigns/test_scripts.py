"""The training recipes with stand-ins for torchrun and Slurm, and the sweep on CPU ranks."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.waiting import PATIENCE

RECIPES = {
    "pretrain_gpt_v_half": ["--pp-schedule", "v-half"],
    "pretrain_gpt_pipeoffload": ["--pp-offload", "auto"],
    "pretrain_moe_mpipemoe": ["--moe-pipeline-chunks", "2"],
}


def run(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """A script with these settings in its environment."""
    env = {**os.environ, "PYTHON": sys.executable, **settings}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_starts_the_launcher_with_its_flags(recipe: str) -> None:
    done = run([f"scripts/{recipe}.sh", "--seed", "7"], DRY_RUN="1", TP="2")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[words.index("-m", 3) + 1] == "megatron_ext.launch"
    assert words[-2:] == ["--seed", "7"] and "--sequence-parallel" in words
    flag, value = RECIPES[recipe]
    assert words[words.index(flag) + 1] == value


def test_a_number_that_is_none_is_named() -> None:
    done = run(["scripts/pretrain_gpt_v_half.sh"], DRY_RUN="1", PP="eight")
    assert done.returncode == 2 and "PP must be a whole number >= 1, got 'eight'" in done.stderr


@pytest.mark.parametrize(("saved", "back"), [("40", True), ("100", False), ("0", False)])
def test_a_job_goes_back_into_the_queue_until_its_end(
    tmp_path: Path, saved: str, back: bool
) -> None:
    """``srun`` stands for a run that saves one checkpoint and ends by the clock."""
    programs = {
        "srun": f'echo "$@" >{tmp_path}/srun; echo {saved} >"$CHECKPOINT_DIR/'
        'latest_checkpointed_iteration.txt"',
        "scontrol": f'if [ "$1" = requeue ]; then echo "$2" >{tmp_path}/requeued; '
        "else echo first; echo second; fi",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run(
        ["bash", "scripts/slurm/pretrain_gpt_v_half.sbatch", "--seed", "7"],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="first,second",
        CHECKPOINT_DIR=str(tmp_path),
        TRAIN_ITERS="100",
        EXIT_MINUTES="5",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "srun").read_text().endswith("/scripts/pretrain_gpt_v_half.sh --seed 7\n")
    assert (tmp_path / "requeued").exists() == back


def test_the_sweep_compares_schedules(tmp_path: Path) -> None:
    """Two CPU ranks train under stock's 1F1B and two schedules, with equal losses."""
    done = run(
        ["scripts/sweep_schedules.sh"],
        DEVICE="cpu",
        GPUS_PER_NODE="2",
        STEPS="4",
        SCHEDULES="v-half nonsense",
        CHUNKS="1",
        SWEEP_DIR=str(tmp_path),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {
        row["schedule"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]
    }
    assert rows["v-half"]["loss_difference"] == 0 and rows["v-half"]["peak_microbatches"] == 2
    assert not rows["nonsense"]["complete"]
