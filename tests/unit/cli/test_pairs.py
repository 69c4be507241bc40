"""--exchange and --overlap of the commands."""

from __future__ import annotations

import pytest

from .conftest import answer, options

SENT = ["--exchange", "0.3,0.4"]


def test_what_is_hidden(run):
    argv = [*options("interleaved", 2, 4), *SENT]
    alone, pairs = answer(run, "simulate", *argv), answer(run, "simulate", *argv, "--overlap")
    assert alone["hidden_exchange"] == 0
    assert 0 < pairs["hidden_exchange"] <= pairs["hidden_exchange_steady"] <= 1
    assert pairs["makespan"] < alone["makespan"]
    assert pairs["exchange"] == [2.8, 2.8]  # four microbatches
    assert max(pairs["exposed_exchange"]) < 2.8
    text = run("simulate", *argv, "--overlap")[1]
    assert "exchange 0.3 of F, 0.4 of B" in text and "hidden, " in text
    assert "hidden_exchange" not in answer(run, "simulate", *options("interleaved", 2, 4))
    assert "hidden: of the exchange" in run("compare", "--pp", 2, "--microbatches", 2, *SENT)[1]


def test_files_keep_costs_and_pairs(run, tmp_path):
    path = tmp_path / "s.json"
    argv = [*options("v-half", 2, 6), *SENT, "--overlap"]
    assert run("schedule", *argv, "--output", path)[0] == 0
    assert run("simulate", "--schedule", path)[0] == 0
    made, read = answer(run, "simulate", *argv), answer(run, "simulate", "--schedule", path)
    for key in ("makespan", "hidden_exchange", "exposed_exchange"):
        assert read[key] == made[key]
    later = answer(run, "simulate", "--schedule", path, "--hop", 1)
    assert later["exchange"] == made["exchange"] and later["makespan"] > made["makespan"]
    same = answer(run, "simulate", "--schedule", path, "--cost", "1,1,1")
    assert same["makespan"] == made["makespan"]  # --cost leaves the file's exchange


PAIRS = ["simulate", *options("v-half", 2, 4), *SENT, "--overlap"]
FILE = ["--schedule", "FILE"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["simulate", *options("zb-h1", 2, 2), "--overlap"], "of --exchange F,B; give both"),
        (["simulate", *options("zb-h1", 2, 2), "--exchange", "1"], "needs two times F,B"),
        (["simulate", *options("zb-h1", 2, 2), "--exchange", "2,0"], "costs of F and B contain it"),
        (["simulate", *FILE, *SENT, "--overlap"], "the order in FILE is fixed; leave --overlap"),
        (
            [*PAIRS, "--vocabulary", "0.1,0.1,0.1,0.1"],
            "passes do not run in pairs beside a sharded vocabulary; leave out one of them",
        ),
        (
            [*PAIRS, "--offload", "half", "--offload-time", 0.25],
            "passes do not run in pairs beside offload; leave out one of them",
        ),
    ],
)
def test_what_cannot_be(run, tmp_path, argv, text):
    path = tmp_path / "s.json"
    if "FILE" in argv:
        run("schedule", *options("zb-h1", 2, 2), "--output", path)
    status, _, err = run(*(path if one == "FILE" else one for one in argv))
    assert status != 0
    assert text.replace("FILE", str(path)) in err
