"""Embedding and output layer that a script freezes while it builds its model stay as they are,
also where every rank has a part of them (``--pp-vocab-parallel``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, Serve, nightly
from tests.support.server import Outcome

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-1
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split
90,5,5 --eval-iters 0 --eval-interval 9 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--clip-grad 1 --position-embedding-type rope --pipeline-model-parallel-size 2 --optimizer sgd"""
OURS = "--pp-schedule zb-h1 --pp-vocab-parallel"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A run of the stock script whose function that builds the model freezes or hooks some."""
    server, prelude = serve(MAIN_TAG), ROOT / "tests" / "support" / "freezing.py"

    known: dict[str, Outcome] = {}

    def run(flags: str, tied: bool = False, **value: list[str]) -> Outcome:
        words = [*MODEL.split(), *flags.split()]
        words += [] if tied else ["--untie-embeddings-and-output-weights"]
        key = f"{words} {value}"
        if key not in known:
            folder: Path = tmp_path_factory.mktemp("run")
            known[key] = server.run(words, 2, folder, prelude=prelude, value=value, grace=1)
        return known[key]

    return run


def numbers(outcome: Outcome) -> list[float]:
    """Loss and gradient norm of every iteration."""
    assert outcome.status == "ok", outcome.report
    found = [
        float.fromhex(text)
        for step in outcome.losses()
        for text in (step["losses"]["lm loss"], step["grad_norm"])
    ]
    assert len(found) == 6
    return found


@pytest.mark.parametrize(
    ("frozen", "tied"),
    [
        ([EMBEDDING], False),
        nightly([OUTPUT], False),
        nightly([EMBEDDING, OUTPUT], False),
        ([EMBEDDING, OUTPUT], True),
    ],
)
def test_what_is_frozen_stays(train: Train, frozen: list[str], tied: bool) -> None:
    stock, ours = (numbers(train(flags, tied, frozen=frozen)) for flags in ("", OURS))
    trained = numbers(train(OURS, tied))
    assert ours == pytest.approx(stock, rel=1e-5)
    assert ours[1:] != pytest.approx(trained[1:], rel=1e-3)


def test_a_hook_on_the_embedding_module_is_called(train: Train) -> None:
    doubled = ["embedding.word_embeddings"]
    stock, ours = (numbers(train(flags, doubled=doubled)) for flags in ("", OURS))
    assert ours == pytest.approx(stock, rel=1e-5)
    assert ours != pytest.approx(numbers(train(OURS)), rel=1e-3)


def test_what_the_parts_cannot_follow_is_refused(train: Train) -> None:
    for value, text in (
        ({"hooked": [OUTPUT]}, "which would get hidden states; remove those on their weights"),
        ({"frozen": [EMBEDDING], "tied": True}, "but 1 of 2 are frozen"),
        ({"doubled": ["output_layer"]}, "would get hidden states; remove "),
        ({"doubled": [""]}, "would get hidden states; remove "),
    ):
        outcome = train(OURS, **value)
        assert outcome.status == "failed"
        said = [x for rank in (0, 1) for x in outcome.log(rank).splitlines() if text in x]
        said = list(dict.fromkeys(said))  # of a matrix by both ranks, of the output layer by one
        assert len(said) == 1 and said[0].startswith("[megatron_ext] error: ")


def test_one_copy_of_a_v_is_not_frozen_alone(train: Train) -> None:
    """Stock waits for ever for the other copy's gradient; rank 0 of a V has both."""
    outcome = train("--pp-schedule v-half --num-layers 4", tied=True, frozen=[EMBEDDING])
    assert outcome.status == "failed"
    assert "one of them is frozen; freeze all of them or none" in outcome.log(0)
