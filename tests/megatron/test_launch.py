"""The launcher on real Megatron: wrong flags end before training, with one sentence."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.checkouts import INSTALLED, Serve, run

# A model that Megatron accepts; each test breaks one thing.
FLAGS = shlex.split(
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--pp-schedule", "v-quarter", "--pipeline-model-parallel-size", "2"],
            "'v-quarter' is not known",
        ),
        (["--pp-schedule", "vhalf"], "did you mean v-half?"),
        (["--pp-shedule", "v-half"], "--pp-shedule is not known; did you mean --pp-schedule?"),
        (["--pp-schedule", "v-half", "--num-lyers", "8"], "did you mean --num-layers?"),
        (
            [
                *["--pp-schedule", "v-half", "--pipeline-model-parallel-size", "2"],
                *["--pp-trace", "/proc/nowhere"],
            ],
            "--pp-trace /proc/nowhere cannot be written",
        ),
        (["--pp-cost", "1,1,1"], "--pp-cost needs --pp-schedule"),
    ],
)
@pytest.mark.version(INSTALLED)
def test_wrong_flags_end_with_one_sentence(
    serve: Serve, tmp_path: Path, flags: list[str], sentence: str
) -> None:
    outcome = serve(INSTALLED).run([*FLAGS, *flags], 2, tmp_path / "run", grace=60)
    assert outcome.exits == (2, 2), outcome.log(0)
    output = outcome.log(0)
    ours = [x for x in output.splitlines() if x.startswith("[megatron_ext] error: ")]
    assert len(ours) == 1, output[-3000:]
    assert sentence in ours[0]
    assert "Traceback" not in output


def test_unsupported_megatron(tmp_path: Path) -> None:
    """A Megatron of a version that we do not know is refused by name, before anything runs."""
    core = tmp_path / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text('__version__ = "0.12.3"\n')
    program = tmp_path / "checkout" / "pretrain_gpt.py"
    program.write_text('print("TRAINS")\n')
    done = run(
        [warm.python(""), "-m", "megatron_ext.launch", str(program), "--pp-schedule", "v-half"]
    )
    assert done.returncode == 2, done.stdout
    assert "megatron-core 0.12.3 is not supported" in done.stdout
    assert "supports 0.18 to 0." in done.stdout
    assert "TRAINS" not in done.stdout


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_a_run_on_cpus_ends_with_its_scripts_threads(tmp_path: Path, end: str, status: int) -> None:
    """As a process that Python ends: one that is writing, and tasks that wait for a worker. What
    the interpreter would destroy stays: it may abort then, as gloo has."""
    program = tmp_path / "script.py"
    program.write_text(
        "import os, sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def write(text):\n"
        "    time.sleep(0.5)\n"
        "    print(text, flush=True)\n"
        "threading.Thread(target=write, args=('A THREAD',)).start()\n"
        "pool = ThreadPoolExecutor(1)\n"
        "for number in range(3):\n"
        "    pool.submit(write, f'TASK {number}')\n"
        "class Torn:\n"
        "    def __del__(self, abort=os.abort):\n"
        "        abort()\n"
        f"sys.torn = Torn()\n{end}\n"
    )
    done = run([warm.python(""), "-m", "megatron_ext.launch", "--device", "cpu", str(program)])
    assert done.returncode == status, done.stdout
    assert {"A THREAD", "TASK 0", "TASK 1", "TASK 2"} <= {*done.stdout.splitlines()}
