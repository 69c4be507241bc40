"""The comparison of flags, plan and packages over ranks: what counts, and its sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_ext.integration.features import consistency as agreement
from megatron_ext.integration.flags import add_arguments, given_to_megatron
from megatron_ext.integration.utils import file_contents
from tests.support.checkouts import run_cases


def test_the_sentence() -> None:
    same = {"--pp-cost": "1,1,1", "torch": "2.9"}
    assert agreement.difference([same] * 4) == ""
    text = agreement.difference([same, same, {**same, "--pp-cost": "1,2,1"}, same])
    assert text.startswith("rank 2 runs with --pp-cost 1,2,1, but 3 of 4 ranks with 1,1,1; start")
    text = agreement.difference([{"torch": "2.8"}, same, same, same])
    assert text.startswith("rank 0 runs with torch 2.8, but 3 of 4 ranks with 2.9")
    assert "(they differ in --pp-cost too)" in text
    text = agreement.difference([same, {**same, "torch": "2.8"}] * 10)
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 2 more run with torch 2.8, but 10 of 20" in text


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_WATCHDOG_SECONDS", "5")
    monkeypatch.setenv("MEGATRON_EXT_TRACE", "1")  # may be set on one rank alone
    said = agreement.facts({"--pp-cost": "1,1,1"}, "ab12", "0.19.0")
    assert said["$MEGATRON_EXT_WATCHDOG_SECONDS"] == "5"
    assert "$MEGATRON_EXT_TRACE" not in said
    assert (said["megatron-core"], said["the plan"]) == ("0.19.0", "ab12")
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("x")
    other.write_text("x")
    assert file_contents(str(one)) == file_contents(str(other))
    assert "No such file" in file_contents(str(tmp_path / "none"))


def test_what_counts_of_megatrons_flags() -> None:
    """What was given, once; of paths that they were, of a rank's own number nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.99])
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--local-rank", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-fusion", action="store_false", dest="fusion")
    parser.add_argument("--fusion", action="store_true", default=True)
    parser.add_argument("--align", action=argparse.BooleanOptionalAction, default=True)
    add_arguments(parser)

    def given(line: str) -> dict[str, str]:
        return given_to_megatron(parser.parse_args(line.split()), parser)

    assert given("--local-rank 3 --pp-schedule v-half --pp-cost 1,1,1") == {}
    assert given("--lr 1e-3") == given("--lr 0.001") == {"--lr": "0.001"}
    assert given("--betas 1 0") == {"--betas": "1.0 0.0"}
    assert given("--data-path 0.3 /a/b 0.7 c") == {"--data-path": "0.3 a path 0.7 c"}
    assert given("--bf16 --no-fusion") == {"--bf16": "given", "--no-fusion": "given"}
    assert given("--no-align") == {"--align": "False"}


def test_other_packages(tmp_path: Path) -> None:
    """All ranks say the same of the one whose torch and megatron_ext are other ones."""
    run_cases("megatron.cases.agreement_cases", str(tmp_path))
    (said,) = {(tmp_path / str(rank)).read_text() for rank in range(3)}
    assert said.startswith("rank 1 runs with torch 9.9, but 2 of 3 ranks with ")
    assert "(they differ in megatron_ext too)" in said
