"""The unmodified ``pretrain_gpt.py`` of a stock checkout: same losses as stock, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, evaluation between training steps.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from .conftest import MAIN_TAG, checkout, needs_megatron, run

CHECKOUT = checkout(MAIN_TAG)

pytestmark = [
    needs_megatron,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.version_info < (3, 12), reason="core_v0.19 needs Python 3.12"),
    pytest.mark.skipif(
        CHECKOUT is None, reason=f"needs a checkout; run ./scripts/get_megatron.sh {MAIN_TAG}"
    ),
]

MODEL = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split
90,5,5 --eval-iters 1 --eval-interval 2 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--untie-embeddings-and-output-weights
--clip-grad 0 --ckpt-format torch_dist --bf16 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather"""

TRAINING = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)")
EVALUATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: (\S+)")


def train(*flags: str, ranks: int = 4) -> dict[str, list[tuple[str, ...]]]:
    """Train under the launcher; what Megatron's log says of losses and gradient norms."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_ext.launch", "--device", "cpu"]
    command += [str(CHECKOUT / "pretrain_gpt.py"), *MODEL.split(), *flags]
    done = run(command, 200)
    assert done.returncode == 0, done.stdout[-6000:]
    log = done.stdout.replace("\n", " ")
    return {"training": TRAINING.findall(log), "evaluation": EVALUATION.findall(log)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start a run from the weights that stock, without a pipeline, wrote."""
    folder = tmp_path_factory.mktemp("weights")
    train("--train-iters", "1", "--save", str(folder), "--save-interval", "1", ranks=1)
    load = ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]
    return load


@pytest.fixture(scope="module")
def stock(weights: list[str]) -> dict[str, list[tuple[str, ...]]]:
    """Stock 1F1B from these weights, PP 4."""
    found = train(*weights, "--pipeline-model-parallel-size", "4")
    assert len(found["training"]) == 3
    assert len(found["evaluation"]) >= 2
    return found


def test_v_half_at_pp_4(
    weights: list[str], stock: dict[str, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    flags = ["--pipeline-model-parallel-size", "4", "--pp-schedule", "v-half"]
    assert train(*weights, *flags, "--pp-trace", str(tmp_path)) == stock
    for rank in range(4):
        lines = [json.loads(x) for x in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        trained = [line for line in lines if not line["forward_only"]]
        assert len(trained) == 3
        assert len(lines) > len(trained)  # evaluation ran through the executor too
        assert {line["peak_sets"] for line in trained} == {6}


def test_v_zb_at_pp_2(
    weights: list[str], stock: dict[str, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    """Another pipeline size, same losses: the data-parallel case is in test_numerics."""
    flags = ["--pipeline-model-parallel-size", "2", "--pp-schedule", "v-zb"]
    assert train(*weights, *flags, "--pp-trace", str(tmp_path), ranks=2) == stock
    lines = (tmp_path / "rank0.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["schedule"] == "v-zb"
