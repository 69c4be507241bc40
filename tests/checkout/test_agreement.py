"""One rank that runs with anything else ends the job before the first step, by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.integration.features import consistency as agreement
from megatron_ext.prove.server import Outcome
from megatron_ext.schedule import generate
from megatron_ext.schedule.io import save
from tests.support.checkouts import MAIN_TAG, Serve

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
            own[rank] += ["--merge-file", str(tmp_path / f"{rank}.txt")]
        outcome = start(more=own)
        assert outcome.status == "ok", outcome.report
        assert len(outcome.losses()) == 1

    def test_other_devices_follow_the_first_ranks(
        self, start: Callable[..., Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ranks with other devices would make other orders; they take the one that ``plan`` has for
        the first rank's, and the log has its costs."""
        named = tmp_path / "named.py"
        named.write_text(
            "import torch\n"
            "def prepare(names, rank, folder):\n"
            "    torch.cuda.get_device_name = lambda *a: names[rank]\n"
        )
        names = ["NVIDIA H100 80GB HBM3"] * 2 + ["NVIDIA A100-SXM4-80GB"] * 2
        outcome = start("--pp-schedule", "v-half", prelude=named, value=names)
        assert outcome.status == "ok", outcome.report
        assert len(outcome.losses()) == 1
        # The launcher adds these flags without GPUs.
        line = f"{MODEL} --transformer-impl local --no-gradient-accumulation-fusion"
        command = ["plan", "--from-args", line, "--pp", "4", "--gpu", "H100", "--json"]
        command += ["--schedules", "v-half", "--micro-batch-sizes", "1", "--no-balance"]
        assert cli.main([*command, "--cheap-recompute", "off", "--offload", "off"]) == 0
        chosen = json.loads(capsys.readouterr().out)["chosen"]
        assert not any("--pp-cost" in words for words in chosen["flags"])
        first, *_, last = chosen["stage_cost"]["stages"]
        said = re.findall("order is made for times estimated for H100.*", outcome.log(0))
        assert len(said) == 1 and f"F,B,W of stage 0 {','.join(map(str, first))}; " in said[0]
        assert f"; stage 7 {','.join(map(str, last))}; hop " in said[0]
        for rank in (2, 3):
            assert f"rank {rank} has a 'NVIDIA A100-SXM4-80GB', but" in outcome.log(rank)

    def test_another_flag(self, start: Callable[..., Outcome]) -> None:
        said = _said(start("--pp-schedule", "zb-h1", more={2: ["--pp-cost", "1,2,1"]}))
        assert said.startswith("rank 2 runs with --pp-cost 1,2,1, but 3 of 4 ranks with not given")

    @pytest.mark.matrix
    def test_another_flag_of_megatrons(self, start: Callable[..., Outcome]) -> None:
        said = _said(start("--pp-schedule", "zb-h1", more={3: ["--lr", "2e-3"]}))
        assert said.startswith("rank 3 runs with Megatron's --lr 0.002, but 3 of 4 ranks with 0.00")
        assert "differ in" not in said

    @pytest.mark.matrix
    def test_another_plan_in_a_file_of_the_same_name(
        self, start: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        save(generate("zb-h1", 4, 8), tmp_path / "a.json")
        save(generate("1f1b", 4, 8), tmp_path / "b.json")
        files = {rank: ["--pp-schedule", str(tmp_path / "a.json")] for rank in range(3)}
        said = _said(start(more={**files, 3: ["--pp-schedule", str(tmp_path / "b.json")]}))
        assert said.startswith("rank 3 runs with --pp-schedule a file with SHA-256 ")
        assert "(they differ in the plan too)" in said

    @pytest.mark.matrix
    def test_another_environment(self, start: Callable[..., Outcome]) -> None:
        said = _said(
            start(
                *("--pp-schedule", "zb-h1"),
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
