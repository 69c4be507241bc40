"""The launcher's own part: its arguments, where it looks for Megatron, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext import launch
from tests.support import warm
from tests.support.checkouts import nightly
from tests.support.waiting import PATIENCE

Run = Callable[..., "subprocess.CompletedProcess[str]"]
LAUNCH = (sys.executable, "-m", "megatron_ext.launch")


def warm_launch() -> tuple[str, str, str]:
    """The same where torch is imported already, for what does not look at how Python started."""
    return (warm.python(""), *LAUNCH[1:])


# Prints what a script sees of how it was started.
PROBE = """
import json, os, sys
print(json.dumps([sys.argv, sys.path[0], __name__, __file__]))
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    folder = tmp_path / "folder with space"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    return folder / "probe.py"


def test_runs_a_script_as_python_would(run: Run, probe: Path) -> None:
    done = run(*LAUNCH, "--device=cuda", probe, "--device", "x", "-m", "positional")
    assert done.returncode == 0, done.stderr
    argv, first, name, file = json.loads(done.stdout)
    assert argv == [str(probe), "--device", "x", "-m", "positional"]
    assert (first, name, file) == (str(probe.parent), "__main__", str(probe))
    assert done.stderr == ""


def test_relative_path_and_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("raise KeyError('x')")
    done = run(*warm_launch(), "raises.py")
    assert done.returncode == 1
    assert "raises.py" in done.stderr and "KeyError: 'x'" in done.stderr


def test_missing_script_is_one_sentence(run: Run) -> None:
    done = run(*LAUNCH, "nowhere/pretrain_gpt.py", "--num-layers", "2")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "[megatron_ext] error: the script nowhere/pretrain_gpt.py does not exist"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("rank", ["0", nightly("1")])
def test_config_error_is_one_sentence(run: Run, tmp_path: Path, rank: str) -> None:
    program = "from megatron_ext.integration import ConfigError\nraise ConfigError('use 4 ranks.')"
    (tmp_path / "wrong.py").write_text(program)
    done = run(*warm_launch(), "wrong.py", RANK=rank)
    assert (done.returncode, done.stderr) == (2, "[megatron_ext] error: use 4 ranks.\n")


def test_ranks_of_a_node_report_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun prints what the first of them has left in its error file; another error of another
    rank is reported there too."""
    program = "from megatron_ext.integration import ConfigError\nraise ConfigError('use 4 ranks.')"
    (tmp_path / "wrong.py").write_text(program)
    files = [tmp_path / "attempt" / str(rank) / "error.json" for rank in (0, 1)]
    for path in files:
        path.parent.mkdir(parents=True)
    own = {"RANK": "8", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(files[0])}
    done = run(*warm_launch(), "wrong.py", **own)
    assert done.stderr == "[megatron_ext] error: use 4 ranks.\n"
    left = json.loads(files[0].read_text())["message"]
    assert left["extraInfo"]["py_callstack"] == "[megatron_ext] use 4 ranks."
    monkeypatch.setattr(launch, "_FIRST_RANK_S", 0.3)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for other, same in (("use 4 ranks.", True), ("use 8 ranks.", False)):
        files[0].write_text(json.dumps({"message": {**left, "message": other}}))
        assert launch._first_says("use 4 ranks.", files[1]) is same


@pytest.mark.matrix
def test_torchrun_ends_with_the_sentence(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = "from megatron_ext.integration import ConfigError\nraise ConfigError('use 4 ranks.')"
    (tmp_path / "wrong.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run(*command, "--nproc-per-node", "2", *LAUNCH[1:], "wrong.py")
    assert done.returncode == 1
    assert done.stderr.count("[megatron_ext] error: use 4 ranks.") == 1, done.stderr
    assert "traceback : [megatron_ext] use 4 ranks." in "\n".join(done.stderr.splitlines()[-3:])


def test_a_pipeline_needs_ranks_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    flags = ["--pp-schedule=v-half", "--num-layers", "8"]
    with pytest.raises(launch.LaunchError, match="torchrun --nproc-per-node N"):
        launch._require_ranks(flags)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(launch.LaunchError, match="no CUDA device; .* add --device cpu"):
        launch._require_ranks(flags)
    launch._require_ranks([*flags, "--help"])
    launch._require_ranks(flags[1:])


@pytest.mark.matrix
def test_a_loss_log_is_tried_before_training(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    (tmp_path / "never.py").write_text("print('TRAINS')")
    done = run(*LAUNCH, "--loss-log", "/proc/x/y", "never.py")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "--loss-log /proc/x/y cannot be written" in done.stderr.splitlines()[-1]


def test_checkout_of_the_script_wins(run: Run, tmp_path: Path) -> None:
    for name in ("checkout", "other"):
        core = tmp_path / name / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text(f"WHERE = {name!r}")
    examples = tmp_path / "checkout" / "examples" / "gpt"
    examples.mkdir(parents=True)
    (examples / "train.py").write_text("import megatron.core as c; print(c.WHERE)")
    # From inside another checkout, and with that one on PYTHONPATH.
    done = subprocess.run(
        [*LAUNCH, str(examples / "train.py")],
        cwd=tmp_path / "other",
        env={"PYTHONPATH": f"{Path(launch.__file__).parents[1]}:{tmp_path / 'other'}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "checkout\n", done.stderr


def test_word_pretrain_gpt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    assert launch._resolve_script("pretrain_gpt").name == "pretrain_gpt_minimal.py"
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    with pytest.raises(launch.LaunchError, match="does not exist"):
        launch._resolve_script("pretrain_gpt")
    (tmp_path / "pretrain_gpt.py").touch()
    assert launch._resolve_script("pretrain_gpt") == tmp_path / "pretrain_gpt.py"


def test_cpu_flags_are_added_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is logged; all of them on demand."""
    launch._cpu_arguments([])
    assert "adds 11 Megatron flags (MEGATRON_EXT_VERBOSE=1 lists them)" in capsys.readouterr().err
    monkeypatch.setenv("MEGATRON_EXT_VERBOSE", "1")
    args = ["--num-workers", "3", "--no-bias-gelu-fusion", "--transformer-impl=local", "--x"]
    full = launch._cpu_arguments(args)
    assert full[: len(args)] == args
    assert full.count("--num-workers") == full.count("--no-bias-gelu-fusion") == 1
    assert "--transformer-impl" not in full
    assert full[full.index("--distributed-backend") + 1] == "gloo"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(flag in said for flag in full[len(args) :])
    assert launch._cpu_arguments(full) == full
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong", [["--distributed-backend", "nccl"], ["--transformer-impl=transformer_engine"]]
)
def test_flags_that_need_a_gpu_are_refused(wrong: list[str]) -> None:
    with pytest.raises(launch.LaunchError, match="needs a GPU"):
        launch._cpu_arguments(wrong)


def test_cpu_device_reaches_spawned_processes(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "spawns.py").write_text(
        """
import multiprocessing, sys, torch

def place(queue):
    queue.put([__name__, str(torch.zeros(1, device="cuda").device)])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=place, args=(queue,))
    process.start()
    print(queue.get(timeout=300), "gloo" in sys.argv)
    process.join(300)
    sys.exit(process.exitcode)
"""
    )
    done = run(*LAUNCH, "--device", "cpu", "spawns.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['__mp_main__', 'cpu'] True\n"
    assert "--device cpu adds" in done.stderr


def test_loss_log_is_exact(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # A stand-in for Megatron's training module in a checkout of its own.
    for package in ("core", "training"):
        (tmp_path / "megatron" / package).mkdir(parents=True)
        (tmp_path / "megatron" / package / "__init__.py").touch()
    (tmp_path / "megatron" / "training" / "training.py").write_text(
        """
def training_log(loss_dict, total_loss_dict, learning_rate, iteration, grad_norm):
    return "stock's answer"
"""
    )
    (tmp_path / "train.py").write_text(
        """
import torch
from megatron.training import training
torch.distributed.init_process_group("gloo", init_method="file://" + __file__ + ".store",
                                     rank=0, world_size=1)
for iteration, norm in ((1, 0.1), (2, None)):
    loss = {"lm loss": torch.tensor(1.0) / 3}
    answer = training.training_log(loss, {}, 0.0, iteration=iteration, grad_norm=norm)
    assert answer == "stock's answer"
"""
    )
    done = run(*warm_launch(), "--device", "cpu", "--loss-log", "log/losses.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "log/losses.jsonl").read_text().splitlines()]
    third = (1 / 3) * (1 + 2**-25)  # a third in single precision, to more digits than it has
    assert [line["iteration"] for line in lines] == [1, 2]
    assert abs(float.fromhex(lines[0]["losses"]["lm loss"]) - third) < 1e-9
    assert [line["grad_norm"] for line in lines] == [(0.1).hex(), None]
