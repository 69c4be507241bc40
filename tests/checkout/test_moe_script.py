"""MoE layers in chunks under the unmodified ``pretrain_gpt.py``, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, experts on two ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.moe import cost_file
from megatron_ext.prove.server import Outcome
from megatron_ext.releases import RELEASES
from tests.support.architectures import DEEPSEEK
from tests.support.checkouts import MAIN_TAG, Serve, nightly, version
from tests.support.features import BASE, OVERLAP

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
CALLS = re.compile(r"over the run, .*?: (\d+) calls")
PP = ("--pipeline-model-parallel-size", "2")

Losses = tuple[list[tuple[str, str]], list[str]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Callable[..., Outcome]:
    folder, count = tmp_path_factory.mktemp("runs"), itertools.count()
    server = serve(MAIN_TAG)

    def run(*flags: str, ranks: int = 4) -> Outcome:
        return server.run([*MODEL.split(), *flags], ranks, folder / str(next(count)))

    return run


@pytest.fixture(scope="module")
def train(start: Callable[..., Outcome]) -> Callable[..., Losses]:
    """Trains; losses of training and evaluation as Megatron logs them."""
    known: dict[tuple[int, tuple[str, ...]], Losses] = {}

    def run(*flags: str, ranks: int = 4) -> Losses:
        key = ranks, flags
        if key not in known:
            outcome = start(*flags, ranks=ranks)
            assert outcome.status == "ok", outcome.report
            log = outcome.log(ranks - 1).replace("\n", " ")
            known[key] = TRAINING.findall(log), EVALUATION.findall(log)
            assert len(known[key][0]) == 3 and known[key][1]
        return known[key]

    return run


def _close(ours: Losses, stock: Losses) -> None:
    """bf16 weights take a step each; the first loss comes from the same ones."""
    assert ours[0][0] == stock[0][0]
    flat = [[float(x) for x in (*itertools.chain(*a), *b)] for a, b in (ours, stock)]
    assert flat[0] == pytest.approx(flat[1], rel=2e-3)


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
def test_a_dropped_activation_changes_nothing(train: Callable[..., Losses]) -> None:
    once = train("--moe-pipeline-chunks", "4")
    assert train("--moe-pipeline-chunks", "4", "--moe-memory-reuse", "s0") == once


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
    """A budget below what stock keeps, under a schedule of ours; the log says what was tried."""
    few = (*PP, "--global-batch-size", "4")
    flags = (*few, "--pp-schedule", "zb-h1", "--moe-pipeline-chunks", "auto")
    flags += ("--moe-memory-reuse", "auto", "--moe-memory-budget", "32KB")
    outcome = start(*flags)
    assert outcome.status == "ok", outcome.report
    log = outcome.log(3).replace("\n", " ")
    _close((TRAINING.findall(log), EVALUATION.findall(log)), train(*few))
    for rank, stage in ((0, 0), (2, 1)):
        said = [line for line in outcome.log(rank).splitlines() if "MoE layers of hidden" in line]
        costs = [cost_file.parse(line[line.index("{") :]) for line in said if "{" in line]
        tried = [line for line in said if "over the run" not in line and "{" not in line]
        summary = [line for line in said if "over the run" in line and "{" not in line]
        assert costs and costs[-1].times  # what --moe-pipeline-costs takes
        assert re.search(r"trying at most \d+ plans, a step each; decided", tried[0]), stage
        calls = sum(int(CALLS.search(line)[1]) for line in summary)  # type: ignore[index]
        assert calls == 3 * 2 * 2  # steps, microbatches, layers
        assert all(re.search(r", s[0-4], ", line) for line in summary)
        assert all("bytes predicted" in line for line in summary)
        assert " ms" in " ".join(summary)
    assert "MoE layers of hidden" not in outcome.log(1)


@pytest.mark.matrix
def test_auto_under_stocks_schedule(
    start: Callable[..., Outcome], train: Callable[..., Losses]
) -> None:
    """A step each: Megatron's own layer, then 2 and 4 chunks."""
    outcome = start("--moe-pipeline-chunks", "auto")
    assert outcome.status == "ok", outcome.report
    log = outcome.log(3).replace("\n", " ")
    _close((TRAINING.findall(log), EVALUATION.findall(log)), train())
    summary = [line for line in outcome.log(0).splitlines() if "over the run" in line]
    for plan in ("Megatron's own layer;", "2 chunks, none, lookahead 2;", "4 chunks, none"):
        assert sum(f"rank: {plan}" in line for line in summary) == 1, plan
    assert "trying at most 8 plans, a step each; decided within 8 steps" in outcome.log(0)


DEEPSEEK_RUN = f"""{BASE} {DEEPSEEK} {OVERLAP} --train-iters 2 --expert-model-parallel-size 2
--num-layers 3 --moe-layer-freq ([0]*1+[1]*2)"""


@pytest.mark.parametrize(
    "tag", [version(tag, nightly=True) for tag in (MAIN_TAG, RELEASES[-1].tag)]
)
def test_deepseek_in_chunks(tag: str, serve: Serve, tmp_path: Path) -> None:
    """Multi-latent attention, dense first layers, grouped routing, shared experts and
    multi-token prediction, whose layer has experts too."""
    server, losses = serve(tag), {}
    for name, ours in {"stock": "", "s4": "--moe-pipeline-chunks 4 --moe-memory-reuse s4"}.items():
        outcome = server.run([*DEEPSEEK_RUN.split(), *ours.split()], 2, tmp_path / name)
        assert outcome.status == "ok", outcome.report
        log = outcome.log(1).replace("\n", " ")
        found = re.findall(r"iteration +\d+/.*?lm loss: (\S+).*?mtp_1 loss: (\S+)", log)
        assert len(found) == 2, log[-3000:]
        losses[name] = [float(x) for x in itertools.chain(*found)]
    assert losses["s4"] == pytest.approx(losses["stock"], rel=2e-3)


def test_a_budget_that_nothing_keeps_ends_before_training(start: Callable[..., Outcome]) -> None:
    flags = ("--moe-pipeline-chunks", "auto", "--moe-memory-reuse", "auto")
    outcome = start(*flags, "--moe-memory-budget", "1KiB", ranks=2)
    assert outcome.status == "failed"
    assert "a budget of 1024 bytes" in outcome.log(0) and "the least is" in outcome.log(0)
    assert "iteration" not in outcome.log(0).split("end of arguments")[1]


@pytest.mark.parametrize(
    ("budget", "numbers"),
    [
        (
            "100TiB",
            # Two pipelines of two ranks: each speaks for itself.
            "--moe-memory-reuse s1 needs 204800.00 GiB of pinned host memory for the 2 ranks",
        ),
        nightly("1KiB", "but --moe-memory-host-budget is 1024; raise"),
    ],
)
def test_too_little_host_memory_ends_before_training(
    start: Callable[..., Outcome], budget: str, numbers: str
) -> None:
    flags = (
        "--moe-pipeline-chunks",
        "2",
        "--moe-memory-reuse",
        "s1",
        "--moe-memory-host-budget",
        budget,
    )
    outcome = start(*flags)
    assert outcome.status == "failed"
    said = [line for line in outcome.log(0).splitlines() if numbers in line]
    assert len(said) == 1 and said[0].startswith("[megatron_ext] error: ")
    assert not TRAINING.search(outcome.log(3).replace("\n", " "))


def test_conflicts_end_before_training(start: Callable[..., Outcome]) -> None:
    flags = ("--moe-pipeline-chunks", "2", "--moe-pad-expert-input-to-capacity")
    outcome = start(*flags, "--moe-expert-capacity-factor", "1.0", ranks=2)
    assert outcome.status == "failed"
    said = [line for line in outcome.log(0).splitlines() if "--moe-pad-expert" in line]
    assert len(said) == 1 and "--moe-pipeline-chunks 2 does not support" in said[0]
    assert "iteration" not in outcome.log(0)
