"""--pp-post-validation in the unmodified ``pretrain_gpt.py``: the same training, bit for bit,
whether its steps are right at once, undone, interrupted by a checkpoint, or killed with the job.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.prove.server import Outcome
from tests.campaigns import random_post_validation as script
from tests.support.checkouts import MAIN_TAG, OLDEST_TAG, Serve, nightly

CLIPPED = {"iteration": 5, "rank": 1, "factor": 1e6}
SOON = {**CLIPPED, "iteration": 3}
REFUSED = {"iteration": 3, "rank": 0, "factor": "inf"}


def compare(serve: Serve, tag: str, folder: Path, setting: str, **case: Any) -> dict[str, Any]:
    runner = script.Runner(serve(tag), case.pop("steps", 8), folder)
    drawn = {"clip": 5.0, "patience": 0, "faults": (CLIPPED,), **case}
    return runner.compare(script.Case(setting, **drawn))


@pytest.mark.parametrize(
    ("setting", "faults", "steps"),
    [
        nightly("bf16, distributed optimizer", (CLIPPED,), 8),
        nightly("fp32, plain", (CLIPPED, {"iteration": 2, "rank": 3, "factor": 1e6}), 8),
        ("experts, overlaps", (SOON, {"iteration": 1, "rank": 0, "factor": 1e6}), 5),
        nightly("experts, overlaps", (CLIPPED, {"iteration": 2, "rank": 0, "factor": 1e6}), 8),
        nightly("bf16, overlaps, dropout", (CLIPPED,), 8),
        nightly("slices, experts, global loss", (CLIPPED,), 8),
        nightly("fp16, plain, dropout", (REFUSED, {"iteration": 6, "rank": 2, "factor": "nan"}), 8),
    ],
)
def test_trains_as_without(
    serve: Serve, tmp_path: Path, setting: str, faults: tuple[dict[str, Any], ...], steps: int
) -> None:
    """Parameters, optimizer state, loss scale, losses, norms, log; every fault is undone."""
    line = compare(serve, MAIN_TAG, tmp_path, setting, faults=faults, steps=steps)
    assert line["result"] == "equal", line
    assert line["undone"] == len(faults) and line["iterations"] == steps


@pytest.mark.matrix
@pytest.mark.version(OLDEST_TAG)
def test_on_the_oldest_version(serve: Serve, tmp_path: Path) -> None:
    line = compare(serve, OLDEST_TAG, tmp_path, "experts, overlaps")
    assert line["result"] == "equal" and line["undone"] == 1, line


class TestOneRun:
    def run(
        self, serve: Serve, folder: Path, flags: str, faults: Any = (), sizes: str | None = None
    ) -> Outcome:
        words = f"{script.BASE} --clip-grad 5 {flags}".split()
        if sizes is not None:
            at = words.index("--global-batch-size")
            words[at : at + 2] = ["--step-batch-size-schedule", sizes]
        value = {"faults": list(faults)}
        return serve(MAIN_TAG).run(words, 4, folder, 180.0, prelude=script.PROBE, value=value)

    @pytest.mark.matrix
    def test_beside_offload_evaluation_and_another_batch(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        flags = (
            f"{script.PP4} --bf16 {script.SHARDED} {script.EXACT} --pp-schedule v-half "
            "--pp-offload full --pp-offload-time 1/4 --pp-offload-transfer single "  # none measured
            "--eval-interval 5 --train-iters 8"
        )
        batches = "0:4 192:6 384:8"  # from so many tokens on
        runs = [
            self.run(serve, tmp_path / name, flags + more, [CLIPPED], batches)
            for name, more in (("usual", ""), ("ahead", " --pp-post-validation 0"))
        ]
        assert [run.status for run in runs] == ["ok", "ok"], runs[1].report
        usual, ahead = (script.computed(run) for run in runs)
        assert usual == ahead and len(ahead[1]) == 8
        assert "post-validation rolled back" in runs[1].log(0)
        # What the log says beside times: the batch has grown on the way.
        sizes = re.findall(r"global batch size: +(\d+)", " ".join(ahead[2]))
        assert sizes == ["4", "4", "4", "6", "6", "8", "8", "8"]

    @pytest.mark.parametrize("factor", [nightly(1e6), "inf"])
    def test_parameters_that_are_gathered_by_the_first_pass(
        self, serve: Serve, tmp_path: Path, factor: Any
    ) -> None:
        """With one chunk a rank Megatron gathers before a pass: a dropped one has, too."""
        flags = (
            f"{script.PP2} {script.FP16} {script.OVERLAP} {script.EXACT} --pp-schedule zb-h2 "
            "--train-iters 4 --num-layers 4"
        )
        fault = {"iteration": 2, "rank": 1, "factor": factor}
        runs = [
            self.run(serve, tmp_path / name, flags + more, [fault])
            for name, more in (("usual", ""), ("ahead", " --pp-post-validation 0"))
        ]
        assert [run.status for run in runs] == ["ok", "ok"], runs[1].report
        usual, ahead = (script.computed(run) for run in runs)
        assert "post-validation rolled back" in runs[1].log(0)
        assert usual == ahead

    def test_packed_documents_of_a_step_that_ran_ahead(self, serve: Serve, tmp_path: Path) -> None:
        """Megatron counts them over all ranks; one whose passes had run waited for no other."""
        flags = (
            f"{script.PP2} {script.EXACT} --pp-schedule zb-h1 --pp-post-validation 0 --clip-grad 9 "
            "--dataloader-inter-document-masking --seq-length 256 --max-position-embeddings 256 "
            "--global-batch-size 4 --train-iters 3"
        )
        run = self.run(serve, tmp_path / "run", flags)
        assert run.status == "ok" and len(run.losses()) == 3, run.report

    @pytest.mark.matrix
    def test_a_signal_and_a_kill(self, serve: Serve, tmp_path: Path) -> None:
        """Saved while the next iteration has begun, and killed: resumed, nothing is different."""
        flags = (
            f"{script.PP4} --bf16 {script.SHARDED} {script.DROPOUT} --pp-schedule 1f1b "
            "--train-iters 12 --pp-post-validation 0 --dist-ckpt-optim-fully-reshardable"
        )
        whole = self.run(serve, tmp_path / "whole", flags, [CLIPPED])
        assert whole.status == "ok", whole.report
        saving = f"{flags} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
        # Nothing foretells this one: iteration 4 has begun when its checkpoint is written.
        told = self.run(
            serve,
            tmp_path / "told",
            f"{saving} --save-interval 100 --exit-signal-handler",
            [CLIPPED, {"iteration": 3, "rank": 0, "signal": 15}],
        )
        assert told.status == "ok" and len(told.losses()) == 4, told.report
        killed = self.run(
            serve,
            tmp_path / "killed",
            f"{saving} --save-interval 3",
            [CLIPPED, {"iteration": 8, "rank": 2, "kill": True}],
        )
        assert killed.status == "failed"
        resumed = self.run(serve, tmp_path / "resumed", f"{saving} --save-interval 3", [CLIPPED])
        assert resumed.status == "ok", resumed.report
        parts = [(told, 0, 4), (killed, 4, 8), (resumed, 6, 12)]
        expected = script.computed(whole)
        for run, begin, end in parts:
            states, losses, _ = script.computed(run)
            assert states == [rank[begin:end] for rank in expected[0]]
            assert losses == expected[1][begin:end]

    @pytest.mark.matrix
    def test_the_comparison_can_fail(self, serve: Serve, tmp_path: Path) -> None:
        flags = f"{script.PP4} --bf16 {script.EXACT} --pp-schedule v-zb --train-iters 6"
        ones = [
            self.run(serve, tmp_path / name, flags, faults)
            for name, faults in (("plain", []), ("clipped", [CLIPPED]))
        ]
        plain, clipped = (script.computed(one) for one in ones)
        assert plain[0][0][:5] == clipped[0][0][:5] and plain[0][0][5] != clipped[0][0][5]
