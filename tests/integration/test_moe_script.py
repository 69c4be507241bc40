"""MoE layers in chunks under the unmodified ``pretrain_gpt.py``, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, experts on two ranks.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from .conftest import MAIN_TAG, ROOT, checkout, needs_megatron

sys.path.insert(0, str(ROOT / "benchmarks"))

from script_server import Outcome, ScriptServer

CHECKOUT = checkout(MAIN_TAG)

pytestmark = [
    needs_megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.version_info < (3, 12), reason="core_v0.19 needs Python 3.12"),
    pytest.mark.skipif(
        CHECKOUT is None, reason=f"needs a checkout; run ./scripts/get_megatron.sh {MAIN_TAG}"
    ),
]

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split
90,5,5 --eval-iters 1 --eval-interval 2 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--untie-embeddings-and-output-weights --disable-bias-linear --swiglu --init-method-std 0.1
--clip-grad 0 --ckpt-format torch_dist --bf16 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2"""

TRAINING = re.compile(r"iteration +\d+/.*?lm loss: (\S+) .*?load_balancing_loss: (\S+)")
EVALUATION = re.compile(r"validation loss at iteration \d+.*?lm loss value: (\S+)")
PP = ("--pipeline-model-parallel-size", "2")

Losses = tuple[list[tuple[str, str]], list[str]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Outcome]]:
    folder, count = tmp_path_factory.mktemp("runs"), itertools.count()
    with ScriptServer(CHECKOUT / "pretrain_gpt.py") as server:
        yield lambda *flags: server.run([*MODEL.split(), *flags], 4, folder / str(next(count)))


@pytest.fixture(scope="module")
def train(start: Callable[..., Outcome]) -> Callable[..., Losses]:
    """Trains on four ranks; losses of training and evaluation as Megatron logs them."""
    known: dict[tuple[str, ...], Losses] = {}

    def run(*flags: str) -> Losses:
        if flags not in known:
            outcome = start(*flags)
            assert outcome.status == "ok", outcome.log(0)[-6000:]
            log = outcome.log(3).replace("\n", " ")
            known[flags] = TRAINING.findall(log), EVALUATION.findall(log)
            assert len(known[flags][0]) == 3 and known[flags][1]
        return known[flags]

    return run


def _close(ours: Losses, stock: Losses) -> None:
    """bf16 weights take a step each; the first loss comes from the same ones."""
    assert ours[0][0] == stock[0][0]
    flat = [[float(x) for x in (*itertools.chain(*a), *b)] for a, b in (ours, stock)]
    assert flat[0] == pytest.approx(flat[1], rel=2e-3)


def test_one_chunk_is_stock(train: Callable[..., Losses]) -> None:
    assert train("--moe-pipeline-chunks", "1", "--moe-memory-reuse", "s4") == train()


def test_chunks_train_as_stock(train: Callable[..., Losses]) -> None:
    first = train("--moe-pipeline-chunks", "4", "--moe-memory-reuse", "s1")
    _close(first, train())
    assert train("--moe-pipeline-chunks", "4") == first


def test_chunks_under_a_schedule_that_offloads(train: Callable[..., Losses]) -> None:
    chunks = (*PP, "--moe-pipeline-chunks", "2")
    wanted = train(*chunks)
    _close(wanted, train(*PP))
    flags = (*chunks, "--moe-memory-reuse", "s2", "--pp-schedule", "zb-h1", "--pp-offload", "full")
    assert train(*flags) == wanted


def test_conflicts_end_before_training(start: Callable[..., Outcome]) -> None:
    flags = ("--moe-pipeline-chunks", "2", "--moe-pad-expert-input-to-capacity")
    outcome = start(*flags, "--moe-expert-capacity-factor", "1.0")
    assert outcome.status == "failed"
    said = [line for line in outcome.log(0).splitlines() if "--moe-pad-expert" in line]
    assert len(said) == 1 and "--moe-pipeline-chunks 2 does not support" in said[0]
    assert "iteration" not in outcome.log(0)
