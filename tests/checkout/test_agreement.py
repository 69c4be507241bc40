"""One rank that runs with anything else ends the job before the first step, by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.schedule import generate
from megatron_ext.schedule.io import save
from tests.support.checkouts import MAIN_TAG, Serve
from tests.support.server import Outcome

from .test_moe_script import MODEL as MOE
from .test_pretrain_script import MODEL

PP = ("--pipeline-model-parallel-size", "4", "--train-iters", "1", "--eval-iters", "0")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Callable[..., Outcome]:
    folder, count, server = tmp_path_factory.mktemp("runs"), itertools.count(), serve(MAIN_TAG)
    return lambda *flags, model=MODEL, **own: server.run(
        [*model.split(), *PP, *flags], 4, folder / str(next(count)), **own
    )


def _said(outcome: Outcome) -> str:
    """What all ranks ended with, before any step."""
    assert outcome.status == "failed", outcome.report
    assert not outcome.losses()
    found = [re.findall(r"^\[megatron_ext\] error: (.*)", outcome.log(r), re.M) for r in range(4)]
    last = {lines[-1] for lines in found if lines}
    assert len(last) == 1, found
    assert "Traceback" not in outcome.log(0)
    return last.pop()


class TestOnRanks:
    def test_equal_ranks_train(self, start: Callable[..., Outcome], tmp_path: Path) -> None:
        """Paths of files and directories may differ: what they hold counts."""
        own = {}
        for rank in range(4):
            save(generate("zb-h1", 4, 8), tmp_path / f"{rank}.json")
            own[rank] = ["--pp-schedule", str(tmp_path / f"{rank}.json")]
            own[rank] += ["--pp-trace", str(tmp_path / f"traces{rank}")]
        outcome = start(more=own)
        assert outcome.status == "ok", outcome.report
        assert len(outcome.losses()) == 1

    def test_another_flag(self, start: Callable[..., Outcome]) -> None:
        said = _said(start("--pp-schedule", "zb-h1", more={2: ["--pp-cost", "1,2,1"]}))
        assert said.startswith("rank 2 runs with --pp-cost 1,2,1, but 3 of 4 ranks with not given")

    @pytest.mark.matrix
    def test_another_plan_in_a_file_of_the_same_name(
        self, start: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        save(generate("zb-h1", 4, 8), tmp_path / "a.json")
        save(generate("1f1b", 4, 8), tmp_path / "b.json")
        files = {rank: ["--pp-schedule", str(tmp_path / "a.json")] for rank in range(3)}
        said = _said(start(more={**files, 3: ["--pp-schedule", str(tmp_path / "b.json")]}))
        assert said.startswith("rank 3 runs with --pp-schedule a file with SHA-256 ")

    @pytest.mark.matrix
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
