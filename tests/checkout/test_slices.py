"""``--pp-slices`` under the unmodified ``pretrain_gpt.py``: the numbers of whole microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, Serve, nightly

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24
--max-position-embeddings 24 --mock-data --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 1 --micro-batch-size 2 --global-batch-size 8 --train-iters 2
--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
--log-interval 1 --eval-interval 100 --eval-iters 0 --transformer-impl local --clip-grad 0
--untie-embeddings-and-output-weights --ckpt-format torch_dist"""
ROPE = """--position-embedding-type rope --group-query-attention --num-query-groups 2 --swiglu
--normalization RMSNorm --disable-bias-linear"""
# Mock documents have 1 to 4095 tokens.
PACKED = """--dataloader-inter-document-masking --micro-batch-size 1 --seq-length 1024
--max-position-embeddings 1024"""

Run = Callable[..., list[float]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Run:
    """Exact losses of every step; runs of one kind of model begin with the same weights."""
    folder, server = tmp_path_factory.mktemp("slices"), serve(MAIN_TAG)
    count, known = itertools.count(), dict[tuple[str, ...], list[float]]()

    def losses(flags: tuple[str, ...], ranks: int) -> list[float]:
        outcome = server.run([*MODEL.split(), *flags], ranks, folder / str(next(count)))
        assert outcome.status == "ok", outcome.report
        return [float.fromhex(line["losses"]["lm loss"]) for line in outcome.losses()]

    def run_once(*flags: str, model: str = ROPE, ranks: int = 2) -> list[float]:
        weights = folder / f"weights{abs(hash(model))}"
        if not weights.exists():
            save = "--save", str(weights), "--save-interval", "1", "--train-iters", "1"
            losses((*model.split(), *save), 1)
        load = "--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng"
        key = (*model.split(), *flags, str(ranks))
        if key not in known:
            pp = () if "--pipeline-model-parallel-size" in flags else (
                "--pipeline-model-parallel-size", "2"
            )  # fmt: skip
            known[key] = losses((*model.split(), *load, *pp, *flags), ranks)
        return known[key]

    return run_once


def close(found: list[float], whole: list[float]) -> bool:
    """Sums of slices round otherwise than those of whole sequences."""
    return len(found) == len(whole) == 2 and found == pytest.approx(whole, rel=2e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        "v-half",
        nightly("zb-h1"),
        nightly("v-zb"),
        nightly("interleaved --num-virtual-stages-per-pipeline-rank 2"),
        nightly("gis-h --num-virtual-stages-per-pipeline-rank 2"),
        nightly("v-cap --pp-memory-cap 0.8"),
        nightly("auto"),
        nightly("auto --pp-memory-cap 1GiB"),
    ],
)
def test_losses_of_whole_microbatches(train: Run, schedule: str) -> None:
    """Bit for bit those of 1F1B with the same slices, whatever the order."""
    flags = schedule.split()
    whole = train("--pp-schedule", "1f1b")
    sliced = train("--pp-schedule", "1f1b", "--pp-slices", "3")
    assert close(sliced, whole)
    assert train("--pp-schedule", *flags, "--pp-slices", "3") == sliced


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        nightly("--recompute-granularity full --recompute-method uniform "
                "--recompute-num-layers 1", ROPE),
        nightly("", "--position-embedding-type learned_absolute"),
        nightly("--no-masked-softmax-fusion", ROPE),
        nightly("--calculate-per-token-loss", ROPE),
        nightly("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", ROPE),
    ],
)  # fmt: skip
def test_options(train: Run, flags: str, model: str) -> None:
    whole = train("--pp-schedule", "1f1b", *flags.split(), model=model)
    found = train("--pp-schedule", "v-half", "--pp-slices", "4", *flags.split(), model=model)
    assert close(found, whole)


@pytest.mark.matrix
def test_tokens_of_a_slice(train: Run) -> None:
    """24 tokens in slices of at most 8 are 3 slices; also where steps are planned by length."""
    flags = "--pp-schedule", "v-half", "--pp-slice-tokens", "8"
    expected = train("--pp-schedule", "v-half", "--pp-slices", "3")
    assert train(*flags) == expected
    assert train(*flags, "--pp-microbatch-costs", "lengths") == expected


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["", PACKED])
def test_tensor_parallel_ranks(train: Run, model: str) -> None:
    """Slices of multiples of their number, where activations are split along the sequence."""
    flags = "--tensor-model-parallel-size", "2", "--sequence-parallel", *model.split()
    whole = train("--pp-schedule", "1f1b", *flags, ranks=4)
    assert close(train("--pp-schedule", "v-half", "--pp-slices", "3", *flags, ranks=4), whole)


@pytest.mark.matrix
def test_data_parallel_ranks(train: Run) -> None:
    flags = "--use-distributed-optimizer", "--overlap-grad-reduce"
    whole = train("--pp-schedule", "1f1b", *flags, ranks=4)
    assert close(train("--pp-schedule", "v-zb", "--pp-slices", "3", *flags, ranks=4), whole)


VOCABULARY = "--pp-vocab-parallel", "--pp-slices", "3"
PADDED = f"{ROPE} --make-vocab-size-divisible-by 64"  # as for all ranks


@pytest.mark.parametrize(
    ("schedules", "flags"),
    [
        (("v-half",), ""),
        nightly(("1f1b", "zb-h1", "v-zb"), ""),
        nightly(("zb-h1", "v-half"),
                "--calculate-per-token-loss"),
        nightly(("v-half",), "--recompute-granularity full --recompute-method uniform "
                "--recompute-num-layers 1 --use-distributed-optimizer --overlap-grad-reduce "
                "--overlap-param-gather"),
    ],
)  # fmt: skip
def test_sharded_vocabulary(train: Run, schedules: Sequence[str], flags: str) -> None:
    """Each slice has its own passes of the vocabulary; the order changes no bit."""
    whole = train("--pp-schedule", "1f1b", *flags.split(), model=PADDED)
    found = [
        train("--pp-schedule", *one.split(), *VOCABULARY, *flags.split(), model=PADDED)
        for one in schedules
    ]
    assert close(found[0], whole) and found == found[:1] * len(found)


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["", PACKED])
def test_sharded_vocabulary_of_tensor_parallel_ranks(train: Run, model: str) -> None:
    flags = "--tensor-model-parallel-size", "2", "--sequence-parallel", *model.split()
    whole = train("--pp-schedule", "1f1b", *flags, model=PADDED, ranks=4)
    found = train("--pp-schedule", "v-half", *VOCABULARY, *flags, model=PADDED, ranks=4)
    assert close(found, whole)


@pytest.mark.matrix
def test_a_script_with_another_loss(serve: Serve, tmp_path: Path) -> None:
    """A sum over slices would be another loss; the launcher starts any script."""
    words = f"{MODEL} {ROPE} --pipeline-model-parallel-size 2 --pp-schedule v-half --pp-slices 3"
    outcome = serve(MAIN_TAG).run(
        words.split(), 2, tmp_path, prelude=ROOT / "tests" / "support" / "squared_loss.py"
    )
    assert outcome.status == "failed"
    assert "needs a loss function that is linear in the losses of tokens" in outcome.log(0)


def test_the_log_and_the_trace_know_slices(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_ext import cli

    flags = ["--pipeline-model-parallel-size", "2", "--pp-schedule", "v-half", "--pp-slices", "3"]
    trace = str(tmp_path / "trace")
    outcome = serve(MAIN_TAG).run(
        [*MODEL.split(), *ROPE.split(), *flags, "--pp-trace", trace], 2, tmp_path / "run"
    )
    assert outcome.status == "ok", outcome.report
    text = outcome.log(0) + outcome.log(1)
    assert "4 microbatches in 3 slices each: planned bubble" in text
    assert "peak activations: 1.333 microbatches (plan 1.333)" in text
    assert cli.main(["show", "--measured", trace, "--output", str(tmp_path / "x.svg")]) == 0
    assert "K = 3" in (tmp_path / "x.svg").read_text()
    capsys.readouterr()
