"""``--pp-microbatch-costs lengths`` under the unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext import cli
from tests.support.checkouts import MAIN_TAG, Serve, nightly
from tests.support.server import Outcome

# Mock documents have 1 to 4096 tokens, so sequences have one document or a few.
MODEL = """--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 512
--max-position-embeddings 512 --mock-data --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 64 --micro-batch-size 1 --global-batch-size 6 --train-iters 3
--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
--log-interval 1 --eval-interval 2 --eval-iters 1 --transformer-impl local --clip-grad 0
--untie-embeddings-and-output-weights --ckpt-format torch_dist --no-check-for-nan-in-loss-and-grad
--position-embedding-type rope --no-masked-softmax-fusion"""
PACKED = "--dataloader-inter-document-masking"
LENGTHS = "--pp-microbatch-costs lengths"

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Run:
    folder, server, count = tmp_path_factory.mktemp("lengths"), serve(MAIN_TAG), itertools.count()

    def run_once(*flags: str, ranks: int = 2) -> Outcome:
        given = " ".join((MODEL, "--pipeline-model-parallel-size 2", *flags)).split()
        outcome = server.run(given, ranks, folder / str(next(count)))
        assert outcome.status == "ok", outcome.report
        return outcome

    return run_once


def losses(outcome: Outcome) -> list[float]:
    return [float.fromhex(line["losses"]["lm loss"]) for line in outcome.losses()]


def test_packed_documents(start: Run) -> None:
    """Bit for bit the run without; each step has an order for its own documents."""
    plain = start(PACKED, "--pp-schedule v-half")
    planned = start(PACKED, "--pp-schedule v-half", LENGTHS)
    assert losses(planned) == losses(plain) and len(set(losses(plain))) == 3
    text = planned.log(0) + planned.log(1)
    assert text.count("planned for its lengths, as every step is") == 1
    assert "planned for its lengths" not in plain.log(0) + plain.log(1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "split",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        nightly("--context-parallel-size 2 --position-embedding-type learned_absolute"),
    ],
)
def test_another_order_with_parallel_ranks(start: Run, tmp_path: Path, split: str) -> None:
    """Only the first of tensor-parallel ranks has data, context-parallel ones have the same; sums
    over microbatches round otherwise."""
    flags = PACKED, "--pp-schedule zb-h1", split
    plain, trace = start(*flags, ranks=4), str(tmp_path / "trace")
    found = start(*flags, LENGTHS, "--pp-reorder-microbatches", f"--pp-trace {trace}", ranks=4)
    assert losses(found) == pytest.approx(losses(plain), rel=1e-6)
    lines = [json.loads(text) for text in (tmp_path / "trace/rank0.jsonl").read_text().splitlines()]
    trained = [line for line in lines if not line["forward_only"]]
    assert [line["tokens"] for line in trained] == [[512] * 6] * 3
    orders = [line["microbatch_order"] for line in trained]
    assert all(sorted(order) == [*range(6)] for order in orders)
    assert any(order != [*range(6)] for order in orders)
    picture = tmp_path / "x.svg"
    assert cli.main(["show", "--measured", trace, "--output", str(picture)]) == 0


@pytest.mark.matrix
def test_replicas_whose_experts_are_balanced_together(start: Run) -> None:
    """Counts are added up over replicas in every F, so these must have one order: else counts of
    different layers would be added."""
    experts = """--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --disable-bias-linear
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type global_aux_loss
    --moe-aux-loss-coeff 10 --global-batch-size 16"""
    flags = PACKED, experts, "--pp-schedule v-half"
    plain, planned = start(*flags, ranks=4), start(*flags, LENGTHS, ranks=4)
    assert planned.losses() == plain.losses()  # and norms of gradients


def test_equal_lengths_change_nothing(start: Run) -> None:
    plain = start("--pp-schedule v-half")
    planned = start("--pp-schedule v-half", LENGTHS, "--pp-reorder-microbatches")
    assert losses(planned) == losses(plain)
    said = re.compile(r"v-half, 2 ranks.*")
    assert said.findall(planned.log(0)) == said.findall(plain.log(0)) != []
    assert "differ in length" not in planned.log(0) + planned.log(1)
