"""The unmodified ``pretrain_gpt.py`` of a stock checkout: same losses as stock, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, evaluation between training steps.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import MAIN_TAG, ROOT, checkout, needs_megatron, run

sys.path.insert(0, str(ROOT / "benchmarks"))

from script_server import ScriptServer

CHECKOUT = checkout(MAIN_TAG)

pytestmark = [
    needs_megatron,
    pytest.mark.timeout(600),
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


Log = dict[str, list[tuple[str, ...]]]


def read(log: str) -> Log:
    """What Megatron's log says of losses and gradient norms."""
    log = log.replace("\n", " ")
    return {"training": TRAINING.findall(log), "evaluation": EVALUATION.findall(log)}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Log]]:
    """Trains under the launcher, on ranks forked from one process that has imported Megatron."""
    folder = tmp_path_factory.mktemp("runs")
    count = itertools.count()

    with ScriptServer(CHECKOUT / "pretrain_gpt.py") as server:

        def run_once(*flags: str, ranks: int = 4) -> Log:
            outcome = server.run([*MODEL.split(), *flags], ranks, folder / str(next(count)))
            assert outcome.status == "ok", outcome.log(0)[-6000:]
            return read(outcome.log(ranks - 1))

        yield run_once


def test_torchrun(weights: list[str], stock: Log) -> None:
    """The same through torchrun, as users start it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "-m", "megatron_ext.launch", "--device", "cpu"]
    command += [str(CHECKOUT / "pretrain_gpt.py"), *MODEL.split(), *weights]
    command += ["--pipeline-model-parallel-size", "4", "--pp-schedule", "v-half"]
    done = run(command, 200)
    assert done.returncode == 0, done.stdout[-6000:]
    assert read(done.stdout) == stock


@pytest.fixture(scope="module")
def weights(train: Callable[..., Log], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start a run from the weights that stock, without a pipeline, wrote."""
    folder = tmp_path_factory.mktemp("weights")
    train("--train-iters", "1", "--save", str(folder), "--save-interval", "1", ranks=1)
    load = ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]
    return load


@pytest.fixture(scope="module")
def stock(train: Callable[..., Log], weights: list[str]) -> Log:
    """Stock 1F1B from these weights, PP 4."""
    found = train(*weights, "--pipeline-model-parallel-size", "4")
    assert len(found["training"]) == 3
    assert len(found["evaluation"]) >= 2
    return found


@pytest.mark.parametrize(
    ("schedule", "pp", "sets"), [("v-half", 4, 6), ("v-zb", 4, 8), ("v-half", 2, 4), ("v-zb", 2, 4)]
)
def test_same_losses(
    train: Callable[..., Log],
    weights: list[str],
    stock: Log,
    tmp_path: Path,
    schedule: str,
    pp: int,
    sets: int,
) -> None:
    """Training and evaluation, whatever the schedule and the pipeline size."""
    flags = ["--pipeline-model-parallel-size", str(pp), "--pp-schedule", schedule]
    assert train(*weights, *flags, "--pp-trace", str(tmp_path), ranks=pp) == stock
    for rank in range(pp):
        lines = [json.loads(x) for x in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        trained = [line for line in lines if not line["forward_only"]]
        assert {line["schedule"] for line in trained} == {schedule}
        assert len(trained) == 3
        assert len(lines) > len(trained)  # evaluation ran through the executor too
        assert {line["peak_sets"] for line in trained} == {sets}
