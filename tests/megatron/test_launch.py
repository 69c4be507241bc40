"""The launcher on real Megatron: wrong flags end before training, with one sentence."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, OLDEST_TAG, checkout, run

MINIMAL = ROOT / "scripts" / "pretrain_gpt_minimal.py"

# A model that Megatron accepts; each test breaks one thing.
FLAGS = shlex.split(
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--untie-embeddings-and-output-weights"
)


def script() -> Path:
    """A pretraining script for an installed or checked-out Megatron."""
    if sys.version_info >= (3, 12):  # whose wheel of megatron-core carries megatron.training
        return MINIMAL
    stock = checkout(OLDEST_TAG)
    if stock is None:
        pytest.skip(f"needs megatron.training; run scripts/get_megatron.sh {OLDEST_TAG}")
    return stock / "pretrain_gpt.py"


def launch(*flags: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of one rank of a four-rank job's launcher."""
    done = run(
        [
            sys.executable,
            "-m",
            "megatron_ext.launch",
            "--device",
            "cpu",
            str(script()),
            *FLAGS,
            *list(flags),
        ],
        110,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", **environment},
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--pp-schedule", "v-quarter", "--pipeline-model-parallel-size", "4"],
            "'v-quarter' is not known",
        ),
        (
            ["--pp-schedule", "v-half", "--pipeline-model-parallel-size", "1"],
            "--pipeline-model-parallel-size >= 2, got 1",
        ),
        (
            [
                *["--pp-schedule", "v-half", "--pipeline-model-parallel-size", "4"],
                *["--num-layers-per-virtual-pipeline-stage", "1"],
            ],
            "remove --num-layers-per-virtual-pipeline-stage 1",
        ),
        (["--pp-cost", "1,1,1"], "--pp-cost needs --pp-schedule"),
    ],
)
def test_wrong_flags_end_with_one_sentence(flags: list[str], sentence: str) -> None:
    status, output = launch(*flags)
    ours = [x for x in output.splitlines() if x.startswith("megatron_ext: ") and "adds" not in x]
    assert status == 2, output[-3000:]
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
        [sys.executable, "-m", "megatron_ext.launch", str(program), "--pp-schedule", "v-half"], 60
    )
    assert done.returncode == 2, done.stdout
    assert "megatron-core 0.12.3 is not supported" in done.stdout
    assert "0.19.x" in done.stdout
    assert "TRAINS" not in done.stdout


def test_main_tag_is_a_supported_line() -> None:
    from megatron_ext.integration.versions import require_supported

    assert require_supported(MAIN_TAG.removeprefix("core_v")) == (0, 19, 0)
