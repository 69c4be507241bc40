"""What ``plan`` answers is valid together with the user's flags by Megatron's own rules."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from typing import Any

from megatron_ext import cli
from tests.support import ROOT, warm
from tests.support.checkouts import INSTALLED
from tests.support.waiting import PATIENCE
from tests.unit.cli.test_plan_cases import PLAIN, SLICED, SMALL

# Megatron checks some flags in its validation and others in the model's configuration.
# One process for all lines of a test: importing Megatron takes longest.
VALIDATE = """
import json, os, sys
from megatron_ext import cpu
cpu.install()
from megatron_ext.integration import install, revert
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.training import arguments
# As where Transformer Engine is installed.
utils._te_version = utils.PkgVersion("2.14.0")
rope_utils.fused_apply_rotary_pos_emb = print
for world, words in json.load(sys.stdin):
    os.environ["WORLD_SIZE"], sys.argv = world, ["pretrain_gpt.py", *words]
    installed = install(words)
    args = arguments.parse_args()
    try:
        arguments.validate_args(args)
        arguments.core_transformer_config_from_args(args)
        print("RESULT", json.dumps([args.pipeline_model_parallel_size, ""]))
    except (AssertionError, ValueError) as error:
        print("RESULT", json.dumps([0, str(error)]))
    finally:
        if installed is not None:
            revert()
"""
RUN = (
    "--max-position-embeddings 65536 --tokenizer-type NullTokenizer --mock-data --lr 1e-4 "
    "--train-iters 2"
)


def validated(lines: list[tuple[str, list[str]]]) -> list[Any]:
    """Of every line, for a number of devices: pipeline ranks, or 0 and Megatron's refusal."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    done = subprocess.run(
        [warm.python(INSTALLED), "-c", VALIDATE],
        env=env,
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
    assert len(rows) == len(lines)
    return [json.loads(row) for row in rows]


def answered(gpu: str, line: str, *more: str) -> tuple[str, list[str]]:
    """The user's line after the difference that ``plan`` prints, without its number of devices."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["plan", "--gpu", gpu, "--from-args", line, "--json", *more]) == 0
    words = shlex.split(line)
    for each in json.loads(out.getvalue())["difference"]:
        sign, *change = shlex.split(each)
        if sign == "-":
            place = words.index(change[0])
            assert words[place : place + len(change)] == change
            del words[place : place + len(change)]
        else:
            words += change
    place = words.index("--world-size")
    world = words[place + 1]
    del words[place : place + 2]
    return world, [*words, *RUN.split()]


def test_answers_are_valid() -> None:
    """Slices of sequences with a sharded vocabulary among them."""
    world, words = answered(*SMALL["small-virtual"])
    wrong = [*words, "--micro-batch-size", "3"]
    line = f"{SLICED} --transformer-impl local"  # its attention is here to be hooked
    sliced = answered("H100", line, "--memory-cap", "1000GiB", *PLAIN)
    assert {"--pp-slices", "--pp-vocab-parallel"} < {*sliced[1]}
    _, line = SMALL["small"]
    full = "--cuda-graph-impl local --recompute-granularity full --recompute-method uniform"
    own = line.replace("--world-size 4 ", f"--micro-batch-size 1 {full} {RUN} ")  # stock's run
    lines = [(world, words), (world, wrong), sliced]
    (pp, why), (none, divide), more, (bad, recompute) = validated(
        [*lines, ("4", [*own.split(), "--recompute-num-layers", "1"])]
    )
    assert (pp, why) == (2, "") and more == [4, ""]
    assert none == 0 and "must be divisible" in divide, "it can fail"
    assert bad == 0 and "recompute" in recompute, "and the configuration"
