"""``megatron-ext prove`` on the unmodified training script: equal, different, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.prove.compare import compare
from megatron_ext.prove.session import refusal
from megatron_ext.prove.shrink import shrink
from tests.support import late, recorded, warm
from tests.support.checkouts import MAIN_TAG, environment, existing, version
from tests.support.proofs import Proofs
from tests.support.server import ScriptServer

MODEL = """--num-layers 32 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096
--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000
--bf16 --swiglu --untie-embeddings-and-output-weights"""


def prove(script: Path, flags: str, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "megatron_ext", "prove", "--json", *options]
    words = ["--", "torchrun", "--nproc-per-node", "8", "--nnodes=2", str(script)]
    words += [*MODEL.split(), *flags.split()]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, env=environment())
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("tag", "layout", "ranks"),
    [
        version(MAIN_TAG, MAIN_TAG, "--pipeline-model-parallel-size 2 --pp-schedule v-half", 2),
        version(
            MAIN_TAG,
            MAIN_TAG,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 "
            "--disable-bias-linear --pp-schedule zb-h1",
            8,
            nightly=True,
        ),
    ],
)
def test_a_layout_is_one_process(tag: str, layout: str, ranks: int) -> None:
    script = existing(tag) / "pretrain_gpt.py"
    status, report = prove(script, layout, "--ranks", str(ranks))
    assert status == 0 and report["equal"] and report["ranks"] == ranks
    stock, ours = report["checks"]
    assert stock["name"] == f"stock Megatron on {ranks} ranks" and "--pp-schedule" in ours["name"]
    for check in (stock, ours):
        assert check["largest"] < 1e-12 and check["compared"] > 50 and not check["skipped"]
    assert ["--bf16", "runs are in float64"] in report["not_kept"]


@pytest.mark.parametrize("tag", [version(MAIN_TAG)])
def test_a_wrong_gradient_is_found(tag: str, tmp_path: Path) -> None:
    """A script whose last stage doubles one weight's gradient on two ranks."""
    script = tmp_path / "wrong.py"
    script.write_text(
        f"""import runpy, sys, torch
sys.path.insert(0, {str(existing(tag))!r})
from megatron.core.models.gpt import gpt_model
init = gpt_model.GPTModel.__init__
def wrong(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if torch.distributed.get_world_size() > 1:
        for name, parameter in self.named_parameters():
            if name == "decoder.final_layernorm.weight":
                parameter.register_hook(lambda gradient: 2 * gradient)
gpt_model.GPTModel.__init__ = wrong
if __name__ == "__main__":
    runpy.run_path({str(existing(tag) / "pretrain_gpt.py")!r}, run_name="__main__")
"""
    )
    status, report = prove(script, "--pipeline-model-parallel-size 2", "--ranks", "2")
    assert status == 1 and not report["equal"]
    (check,) = report["checks"]
    assert check["status"] == "different"
    first = check["differences"][1]  # the norm of all gradients is the first
    assert first.startswith("step 1: gradient of decoder.final_layernorm.weight is ")


# Sizes that do not divide -> what Megatron says of them.
REFUSED = {
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 12": "by vp_size 12",
    "--num-attention-heads 12 --tensor-model-parallel-size 8": "num_attention_heads",
    "--num-attention-heads 12 --pipeline-model-parallel-size 2": "num_attention_heads",
    "--global-batch-size 60 --pipeline-model-parallel-size 2": "(60) must be divisible by",
    "--global-batch-size 24 --pipeline-model-parallel-size 4 "
    "--num-virtual-stages-per-pipeline-rank 2": "6 microbatches leave 2 for a group of 4",
    "--seq-length 4095 --tensor-model-parallel-size 2 --sequence-parallel": "divided by 2",
    "--num-experts 6 --expert-model-parallel-size 4": "Number of experts",
    "--group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4": "(6) must be",
    "--num-layers 30 --pipeline-model-parallel-size 4": "Number of layers should be divisible",
}


@pytest.mark.parametrize(
    ("tag", "flags"),
    [version(MAIN_TAG, MAIN_TAG, one, nightly=i > 1) for i, one in enumerate(REFUSED)],
)
def test_a_command_that_megatron_refuses_is_not_shrunk(
    tag: str, flags: str, tmp_path: Path
) -> None:
    words = [*MODEL.split(), *flags.split()]
    assert shrink(words, 16)  # whose small form would run
    script = existing(tag) / "pretrain_gpt.py"
    assert REFUSED[flags] in refusal(script, words, 16, tmp_path)


@pytest.mark.parametrize("tag", [version(MAIN_TAG)])
def test_late_messages_change_no_bit(tag: str, tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --pp-schedule v-half --pp-offload full"
    small = shrink([*MODEL.split(), *flags.split()], 2)
    script = existing(tag) / "pretrain_gpt.py"
    with ScriptServer(script, warm.python(""), double=True) as server:
        found = [
            Proofs(server, small.world, 2, tmp_path / kind.__name__, kind.__file__ or "").run(
                "layout", small.flags
            )
            for kind in (recorded, late)
        ]
    made = compare(found[1], small.world, found[0], 2, 0.0, small.world)
    assert not made.differences and made.compared > 50
