"""MoE layers in chunks under the unmodified ``pretrain_gpt.py``, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, experts on two ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from tests.support.checkouts import MAIN_TAG, Serve
from tests.support.server import Outcome

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
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
def start(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Callable[..., Outcome]:
    folder, count = tmp_path_factory.mktemp("runs"), itertools.count()
    server = serve(MAIN_TAG)

    def run(*flags: str, ranks: int = 4, steps: int = 3) -> Outcome:
        command = [*MODEL.split(), "--train-iters", str(steps), *flags]
        return server.run(command, ranks, folder / str(next(count)))

    return run


def _losses(outcome: Outcome, ranks: int, steps: int) -> Losses:
    assert outcome.status == "ok", outcome.report
    log = outcome.log(ranks - 1).replace("\n", " ")
    found = TRAINING.findall(log), EVALUATION.findall(log)
    assert len(found[0]) == steps and found[1]
    return found


@pytest.fixture(scope="module")
def train(start: Callable[..., Outcome]) -> Callable[..., Losses]:
    """Trains; losses of training and evaluation as Megatron logs them."""
    known: dict[tuple[int, int, tuple[str, ...]], Losses] = {}

    def run(*flags: str, ranks: int = 4, steps: int = 3) -> Losses:
        key = ranks, steps, flags
        if key not in known:
            known[key] = _losses(start(*flags, ranks=ranks, steps=steps), ranks, steps)
        return known[key]

    return run


def _close(ours: Losses, stock: Losses, within: float = 2e-3) -> None:
    """bf16 weights take a step each; the first loss comes from the same ones."""
    assert ours[0][0] == stock[0][0]
    flat = [[float(x) for x in (*itertools.chain(*a), *b)] for a, b in (ours, stock)]
    assert flat[0] == pytest.approx(flat[1], rel=within)


@pytest.mark.matrix
def test_one_chunk_is_stock(train: Callable[..., Losses]) -> None:
    assert train("--moe-pipeline-chunks", "1", "--moe-memory-reuse", "s4") == train()


def test_chunks_train_as_stock(train: Callable[..., Losses]) -> None:
    """Weight gradients are one product over all chunks' rows, or sums over chunks."""
    few = "--num-layers", "2", "--global-batch-size", "4"
    stock, chunks = train(*few, ranks=2), (*few, "--moe-pipeline-chunks", "4")
    _close(train(*chunks, ranks=2), stock)
    _close(train(*chunks, "--moe-memory-reuse", "s1", ranks=2), stock)


@pytest.mark.matrix
def test_chunks_under_a_schedule_that_offloads(train: Callable[..., Losses]) -> None:
    chunks = (*PP, "--moe-pipeline-chunks", "2")
    wanted = train(*chunks, "--moe-memory-reuse", "s4")
    _close(wanted, train(*PP))
    flags = (*chunks, "--moe-memory-reuse", "s2", "--pp-schedule", "zb-h1", "--pp-offload", "full")
    assert train(*flags) == wanted


def test_what_auto_chooses_trains_as_stock(
    start: Callable[..., Outcome], train: Callable[..., Losses]
) -> None:
    """Six plans, three steps each, with evaluation between, under a schedule of ours; the log says
    what was found."""
    few, steps = (*PP, "--global-batch-size", "4"), 19
    flags = (*few, "--pp-schedule", "zb-h1", "--moe-pipeline-chunks", "auto")
    outcome = start(*flags, "--moe-memory-reuse", "auto", steps=steps)
    _close(_losses(outcome, 4, steps), train(*few, steps=steps), 1e-2)
    said = [line for line in outcome.log(0).splitlines() if "MoE layers: " in line]
    assert len(said) == 2 and "trying 6 plans, 3 steps each" in said[0]
    assert "4 chunks, s4: " in said[1] and "Megatron's own layer: " in said[1]
    assert "MoE layers: " not in outcome.log(1)


def test_conflicts_end_before_training(start: Callable[..., Outcome]) -> None:
    outcome = start("--moe-pipeline-chunks", "2", "--moe-shared-expert-overlap", ranks=2)
    assert outcome.status == "failed"
    said = [line for line in outcome.log(0).splitlines() if "does not support" in line]
    assert len(said) == 1 and "--moe-pipeline-chunks does not support --moe-shared" in said[0]
    assert "iteration" not in outcome.log(0)
