"""--pp-post-validation in the unmodified ``pretrain_gpt.py``: the same training, bit for bit,
whether its steps are right at once, undone, interrupted by a checkpoint, or killed with the job.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from script_server import Outcome

from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.post_validation import REJECTIONS, goes_on
from megatron_ext.integration.rejections import require_supported_features

from .conftest import MAIN_TAG, Serve, checkout, needs_megatron

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts"))

import random_post_validation as script  # noqa: E402

OLDEST_TAG = "core_v0.16.1"
CLIPPED = {"iteration": 5, "rank": 1, "factor": 1e6}
REFUSED = {"iteration": 3, "rank": 0, "factor": "inf"}
needs_checkout = pytest.mark.skipif(
    checkout(MAIN_TAG) is None or sys.version_info < (3, 12),
    reason=f"needs Python 3.12 and a checkout; run ./scripts/get_megatron.sh {MAIN_TAG}",
)
pytestmark = [needs_megatron, pytest.mark.timeout(600)]


def compare(serve: Serve, tag: str, folder: Path, setting: str, **case: Any) -> dict[str, Any]:
    found = checkout(tag)
    assert found is not None
    runner = script.Runner(serve(found, tag), case.pop("steps", 8), folder)
    drawn = {"clip": 5.0, "patience": 0, "faults": (CLIPPED,), **case}
    return runner.compare(script.Case(setting, **drawn))


@needs_checkout
@pytest.mark.parametrize(
    ("setting", "faults"),
    [
        ("bf16, distributed optimizer", (CLIPPED,)),
        ("fp32, plain", (CLIPPED, {"iteration": 2, "rank": 3, "factor": 1e6})),
        ("experts, overlaps", (CLIPPED, {"iteration": 2, "rank": 0, "factor": 1e6})),
        ("bf16, overlaps, dropout", (CLIPPED,)),
        ("fp16, plain, dropout", (REFUSED, {"iteration": 6, "rank": 2, "factor": "nan"})),
    ],
)
def test_trains_as_without(
    serve: Serve, tmp_path: Path, setting: str, faults: tuple[dict[str, Any], ...]
) -> None:
    """Parameters, optimizer state, loss scale, losses, norms, log; every fault is undone."""
    line = compare(serve, MAIN_TAG, tmp_path, setting, faults=faults)
    assert line["result"] == "equal", line
    assert line["undone"] == len(faults) and line["iterations"] == 8


@pytest.mark.skipif(
    checkout(OLDEST_TAG) is None,
    reason=f"needs a checkout; run ./scripts/get_megatron.sh {OLDEST_TAG}",
)
def test_on_the_oldest_version(serve: Serve, tmp_path: Path) -> None:
    line = compare(serve, OLDEST_TAG, tmp_path, "experts, overlaps")
    assert line["result"] == "equal" and line["undone"] == 1, line


@needs_checkout
class TestOneRun:
    def run(
        self, serve: Serve, folder: Path, flags: str, faults: Any = (), sizes: str | None = None
    ) -> Outcome:
        found = checkout(MAIN_TAG)
        assert found is not None
        words = f"{script.BASE} --clip-grad 5 {flags}".split()
        if sizes is not None:
            at = words.index("--global-batch-size")
            words[at : at + 2] = ["--step-batch-size-schedule", sizes]
        value = {"faults": list(faults)}
        server = serve(found, MAIN_TAG)
        return server.run(words, 4, folder, 180.0, prelude=script.PROBE, value=value)

    def test_beside_offload_evaluation_and_another_batch(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        flags = (
            f"{script.PP4} --bf16 {script.SHARDED} {script.EXACT} --pp-schedule v-half "
            "--pp-offload full --pp-offload-time 1/4 --eval-interval 5 --train-iters 8"
        )
        batches = "0:4 192:6 384:8"  # from so many tokens on
        runs = [
            self.run(serve, tmp_path / name, flags + more, [CLIPPED], batches)
            for name, more in (("usual", ""), ("ahead", " --pp-post-validation 0"))
        ]
        assert [run.status for run in runs] == ["ok", "ok"], runs[1].log(0)[-4000:]
        usual, ahead = (script.computed(run) for run in runs)
        assert usual == ahead and len(ahead[1]) == 8
        assert "post-validation undid step" in runs[1].log(0)
        # What the log says beside times: the batch has grown on the way.
        sizes = re.findall(r"global batch size: +(\d+)", " ".join(ahead[2]))
        assert sizes == ["4", "4", "4", "6", "6", "8", "8", "8"]

    def test_a_signal_and_a_kill(self, serve: Serve, tmp_path: Path) -> None:
        """Saved while the next iteration has begun, and killed: resumed, nothing is different."""
        flags = (
            f"{script.PP4} --bf16 {script.SHARDED} {script.DROPOUT} --pp-schedule 1f1b "
            "--train-iters 12 --pp-post-validation 0 --dist-ckpt-optim-fully-reshardable"
        )
        whole = self.run(serve, tmp_path / "whole", flags, [CLIPPED])
        assert whole.status == "ok", whole.log(0)[-4000:]
        saving = f"{flags} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
        # Nothing foretells this one: iteration 4 has begun when its checkpoint is written.
        told = self.run(
            serve,
            tmp_path / "told",
            f"{saving} --save-interval 100 --exit-signal-handler",
            [CLIPPED, {"iteration": 3, "rank": 0, "signal": 15}],
        )
        assert told.status == "ok" and len(told.losses()) == 4, told.log(0)[-4000:]
        killed = self.run(
            serve,
            tmp_path / "killed",
            f"{saving} --save-interval 3",
            [CLIPPED, {"iteration": 8, "rank": 2, "kill": True}],
        )
        assert killed.status == "failed"
        resumed = self.run(serve, tmp_path / "resumed", f"{saving} --save-interval 3", [CLIPPED])
        assert resumed.status == "ok", resumed.log(0)[-4000:]
        parts = [(told, 0, 4), (killed, 4, 8), (resumed, 6, 12)]
        expected = script.computed(whole)
        for run, begin, end in parts:
            states, losses, _ = script.computed(run)
            assert states == [rank[begin:end] for rank in expected[0]]
            assert losses == expected[1][begin:end]

    def test_the_comparison_can_fail(self, serve: Serve, tmp_path: Path) -> None:
        flags = f"{script.PP4} --bf16 {script.EXACT} --pp-schedule v-zb --train-iters 6"
        ones = [
            self.run(serve, tmp_path / name, flags, faults)
            for name, faults in (("plain", []), ("clipped", [CLIPPED]))
        ]
        plain, clipped = (script.computed(one) for one in ones)
        assert plain[0][0][:5] == clipped[0][0][:5] and plain[0][0][5] != clipped[0][0][5]


def test_draws_are_repeatable_and_various() -> None:
    case = script.draw(3, 5, 12)
    assert case == script.draw(3, 5, 12) != script.draw(3, 6, 12)
    settings = {script.draw(1, n, 12).setting for n in range(60)}
    assert settings == set(script.SETTINGS)


def test_documented() -> None:
    page = (ROOT / "docs" / "21-post-validation.md").read_text()
    for rule in REJECTIONS:
        assert f"| `{rule.flag}` | {rule.reason} |" in page


class TestRejections:
    args = SimpleNamespace(
        rerun_mode="disabled",
        optimizer="adam",
        num_distributed_optimizer_instances=1,
        dataloader_type="single",
        fp8=None,
    )

    def refuse(self, **given: Any) -> None:
        args = SimpleNamespace(**{**vars(self.args), **given})
        require_supported_features(args, "--pp-post-validation", False, REJECTIONS)

    def test_what_it_supports(self) -> None:
        self.refuse()
        self.refuse(optimizer="sgd", dataloader_type="cyclic")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"rerun_mode": "validate_results"}, "add --rerun-mode disabled"),
            ({"optimizer": "muon"}, "adam and sgd"),
            ({"fp8": "hybrid"}, "--fp8 .set to hybrid"),
            ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
            ({"mtp_num_layers": 1}, "--mtp-num-layers"),
            ({"dataloader_type": "external"}, "--dataloader-type"),
            ({"qk_clip": True}, "behind the optimizer"),
        ],
    )
    def test_what_it_refuses(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            self.refuse(**given)
        assert "--pp-post-validation does not support" in str(error.value)


class TestGoesOn:
    def goes_on(self, **given: Any) -> bool:
        args = {"curr_iteration": 8, "train_iters": 20, "iterations_to_skip": [], **given}
        return goes_on(SimpleNamespace(**args))

    def test_the_next_iteration_follows(self) -> None:
        assert self.goes_on()
        assert self.goes_on(save_interval=9, save=None)
        assert self.goes_on(save_interval=4, save="folder", eval_interval=10, do_valid=True)

    @pytest.mark.parametrize(
        "given",
        [
            {"train_iters": 9},
            {"save": "folder", "save_interval": 3},
            {"save": "folder", "non_persistent_save_interval": 9},
            {"do_valid": True, "eval_interval": 9},
            {"exit_interval": 3},
            {"iterations_to_skip": [10]},
            {"phase_transition_iterations": [9]},
            {"check_weight_hash_across_dp_replicas_interval": 9},
        ],
    )
    def test_something_comes_between(self, given: dict[str, Any]) -> None:
        assert not self.goes_on(**given)
