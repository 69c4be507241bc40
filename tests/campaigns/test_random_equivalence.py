"""tests/campaigns/random_equivalence.py: what it draws, compares, reports and takes up again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import random_equivalence as script
from tests.campaigns.random_extras import EXTRAS
from tests.support.features import Feature
from tests.support.server import Outcome

CASES = [script.draw(1, number, 10) for number in range(300)]


def test_draws_are_repeatable_and_various() -> None:
    assert [script.draw(1, number, 10) for number in range(300)] == CASES
    assert script.draw(2, 0, 10) != CASES[0]
    schedules = {re.findall(r"--pp-schedule (\S+)", case.ours)[0] for case in CASES}
    assert schedules == set(script.SCHEDULES.split(","))
    everything = " ".join(f"{case.model} {case.run} {case.ours}" for case in CASES)
    for flag in (
        *("--bf16", "--fp16", "--num-experts", "--moe-pipeline-chunks", "--pp-offload auto"),
        *("--recompute-granularity full", "--pp-cheap-recompute", "--overlap-grad-reduce"),
        *("--pp-cost", "--pp-profile-steps", "--pipeline-model-parallel-layout", "TIED"),
        *("--expert-model-parallel-size 2", "--pp-memory-cap"),
    ):
        assert flag in everything


def test_more_features_come_on_top() -> None:
    """The case stays; every extra is drawn sooner or later, and none gives a flag twice."""
    left = set(EXTRAS)
    for number in range(1000):
        wide, case = (script.draw(1, number, 10, wide=more) for more in (True, False))
        assert wide.model.startswith(case.model) and wide.run.startswith(case.run)
        assert wide.ours.startswith(case.ours) and wide.tolerance >= case.tolerance
        more = [
            f" {new[len(old) :].strip()} "
            for new, old in ((wide.model, case.model), (wide.run, case.run), (wide.ours, case.ours))
        ]
        flags = re.findall(r"--[a-z][\w-]*", " ".join(more))
        assert len(flags) == len(set(flags)) >= 2
        left = {e for e in left if not all(p in m for p, m in zip((e.model, e.run, e.ours), more))}
    assert not left


@pytest.mark.parametrize("number", range(0, 300, 7))
def test_both_runs_train_the_same_model(number: int) -> None:
    case = CASES[number]
    layers = int(re.findall(r"--num-layers (\d+)", case.model)[-1])
    pp = int(re.findall(r"--pipeline-model-parallel-size (\d+)", case.run)[0])
    for flags in (case.stock, case.ours):
        layout = re.findall(r"--pipeline-model-parallel-layout (\S+)", flags)
        assert not layout or layout[0].count("t") == layers
    assert "--pp-" not in case.run + case.model
    # Slices are compared with 1F1B in the same slices.
    slices = re.findall(r"--pp-slice.*", case.ours)
    assert re.findall(r"--pp-.*", case.stock) == [
        f"--pp-schedule 1f1b --transformer-impl local {flags}" for flags in slices
    ]
    assert case.world in (pp, 2 * pp)
    assert (case.tolerance == 0) == (case.why == "")


def test_bits_count(tmp_path: Path) -> None:
    """A loss that differs in its last bit is DIFFERENT, unless the case says why it may."""
    outcomes = []
    for name, loss in (("stock", 1.0), ("ours", 1.0 + 2**-52)):
        folder = tmp_path / name
        folder.mkdir()
        line = {"iteration": 1, "losses": {"lm loss": loss.hex()}, "grad_norm": None}
        (folder / "losses.jsonl").write_text(json.dumps(line) + "\n")
        (folder / "rank0.log").write_text(" iteration 1/ 1 | lm loss: 1.0E+00 |\n")
        outcomes.append(Outcome("ok", 1.0, folder))
    assert script.compare(Feature("x", world=1), *outcomes)[0] == "DIFFERENT"
    assert script.compare(Feature("x", world=1, tolerance=1e-9), *outcomes)[0].startswith("~")
    assert script.compare(Feature("x", world=1), outcomes[0], outcomes[0])[0] == "equal"


def test_a_refusal_is_one_sentence_before_training(tmp_path: Path) -> None:
    outcome = Outcome("failed", 1.0, tmp_path)
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_text(
            "[megatron_ext] --device cpu adds x\n"
            "[megatron_ext] error: --pp-cost 1 is wrong; drop it\n"
        )
    assert script._refusal(outcome, 2) == "--pp-cost 1 is wrong; drop it"
    (tmp_path / "rank1.log").write_text("Traceback (most recent call last)\nKeyError: 1\n")
    assert script._refusal(outcome, 2) == ""


def test_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []
    answers = {0: "equal", 1: "rejected", 2: "DIFFERENT", 3: "~1e-07"}

    def run(self: Any, case: script.Case, number: int) -> tuple[str, str, float]:
        ran.append(number)
        if number == 4:
            raise RuntimeError("the script server ended")
        return answers[number], "", 1.0

    monkeypatch.setattr(script.Runner, "run", run)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    results = tmp_path / "results.jsonl"
    command = ["x", "core_v0.19.0", "--results", str(results), "--cases"]
    monkeypatch.setattr(sys, "argv", [*command, "2"])
    assert script.main() == 0
    with results.open("a") as file:
        file.write('{"case": 2, "resu')  # cut off
    monkeypatch.setattr(sys, "argv", [*command, "5"])
    assert script.main() == 1
    assert ran == [0, 1, 2, 3, 4]
    entries = script._done(results)
    assert [entries[n]["result"] for n in range(5)] == [*answers.values(), "FAILED"]
    assert entries[2]["repeat"].endswith("--seed 1 --only 2")
    assert "DIFFERENT: 1, FAILED: 1, equal: 1, rejected: 1, ~: 1" in capsys.readouterr().out
