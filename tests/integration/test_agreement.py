"""One rank that runs with anything else ends the job before the first step, by name."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ext.integration import agreement
from megatron_ext.integration.flags import add_arguments, given_to_megatron
from megatron_ext.schedule import generate

from .conftest import MAIN_TAG, RANKS, ROOT, checkout, needs_megatron, run
from .test_moe_script import MODEL as MOE
from .test_pretrain_script import MODEL

sys.path.insert(0, str(ROOT / "benchmarks"))

from script_server import Outcome, ScriptServer

CHECKOUT = checkout(MAIN_TAG)
PP = ("--pipeline-model-parallel-size", "4", "--train-iters", "1", "--eval-iters", "0")


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
    assert agreement.contents(str(one)) == agreement.contents(str(other))
    assert "No such file" in agreement.contents(str(tmp_path / "none"))


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


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Outcome]]:
    folder, count = tmp_path_factory.mktemp("runs"), itertools.count()
    if CHECKOUT is None or sys.version_info < (3, 12):
        pytest.skip(f"needs Python 3.12 and ./scripts/get_megatron.sh {MAIN_TAG}")
    with ScriptServer(CHECKOUT / "pretrain_gpt.py") as server:
        yield lambda *flags, model=MODEL, **own: server.run(
            [*model.split(), *PP, *flags], 4, folder / str(next(count)), **own
        )


def _said(outcome: Outcome) -> str:
    """What all ranks ended with, before any step."""
    assert outcome.status == "failed", outcome.log(0)[-3000:]
    assert not outcome.losses()
    found = [re.findall(r"^megatron_ext: (?!--)(.*)", outcome.log(r), re.M) for r in range(4)]
    last = {lines[-1] for lines in found if lines}
    assert len(last) == 1, found
    assert "Traceback" not in outcome.log(0)
    return last.pop()


@needs_megatron
@pytest.mark.timeout(300)
class TestOnRanks:
    def test_equal_ranks_train(self, start: Callable[..., Outcome], tmp_path: Path) -> None:
        """Paths of files and directories may differ: what they hold counts."""
        own = {}
        for rank in range(4):
            generate("zb-h1", 4, 8).save(tmp_path / f"{rank}.json")
            own[rank] = ["--pp-schedule", str(tmp_path / f"{rank}.json")]
            own[rank] += ["--pp-trace", str(tmp_path / f"traces{rank}")]
            own[rank] += ["--merge-file", str(tmp_path / f"{rank}.txt")]
        outcome = start(more=own)
        assert outcome.status == "ok", outcome.log(0)[-3000:]
        assert len(outcome.losses()) == 1

    def test_another_flag(self, start: Callable[..., Outcome]) -> None:
        said = _said(start("--pp-schedule", "zb-h1", more={2: ["--pp-cost", "1,2,1"]}))
        assert said.startswith("rank 2 runs with --pp-cost 1,2,1, but 3 of 4 ranks with not given")

    def test_another_flag_of_megatrons(self, start: Callable[..., Outcome]) -> None:
        said = _said(start("--pp-schedule", "zb-h1", more={3: ["--lr", "2e-3"]}))
        assert said.startswith("rank 3 runs with Megatron's --lr 0.002, but 3 of 4 ranks with 0.00")
        assert "differ in" not in said

    def test_another_plan_in_a_file_of_the_same_name(
        self, start: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        generate("zb-h1", 4, 8).save(tmp_path / "a.json")
        generate("1f1b", 4, 8).save(tmp_path / "b.json")
        files = {rank: ["--pp-schedule", str(tmp_path / "a.json")] for rank in range(3)}
        said = _said(start(more={**files, 3: ["--pp-schedule", str(tmp_path / "b.json")]}))
        assert said.startswith("rank 3 runs with --pp-schedule a file with SHA-256 ")
        assert "(they differ in the plan too)" in said

    def test_another_environment(self, start: Callable[..., Outcome]) -> None:
        said = _said(
            start(
                *("--pp-schedule", "v-half"),
                environment={0: {"MEGATRON_EXT_OFFLOAD_MIN_BYTES": "5"}},
            )
        )
        assert said.startswith("rank 0 runs with $MEGATRON_EXT_OFFLOAD_MIN_BYTES 5, but 3 of 4")

    def test_a_rank_without_any_flag_of_ours(self, start: Callable[..., Outcome]) -> None:
        soon = {rank: {agreement.WAIT_ENVIRONMENT: "5"} for rank in range(3)}
        own = {rank: ["--pp-schedule", "zb-h1"] for rank in range(3)}
        said = _said(start(more=own, environment=soon))
        assert said.startswith("rank 3 did not say within 5 s what it runs with")
        assert "--pp-schedule zb-h1" in said

    def test_without_a_schedule(self, start: Callable[..., Outcome]) -> None:
        """MoE flags alone are compared too."""
        said = _said(
            start(
                *("--pipeline-model-parallel-size", "2", "--moe-pipeline-chunks", "2"),
                model=MOE,
                more={1: ["--moe-memory-reuse", "s3"]},
            )
        )
        assert said.startswith("rank 1 runs with --moe-memory-reuse s3, but 3 of 4 ranks with not")

    def test_other_packages(self, tmp_path: Path) -> None:
        """All ranks say the same of the one whose torch and megatron_ext are other ones."""
        done = run([sys.executable, str(RANKS / "agreement_cases.py"), str(tmp_path)], 100)
        assert done.returncode == 0, done.stdout
        (said,) = {(tmp_path / str(rank)).read_text() for rank in range(3)}
        assert said.startswith("rank 1 runs with torch 9.9, but 2 of 3 ranks with ")
        assert "(they differ in megatron_ext too)" in said
