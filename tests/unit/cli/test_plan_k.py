"""``plan --show-k`` and ``plan --calibration``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.commands.plan_k import MODELS, SEQUENCES, WAYS
from megatron_ext.plan.gpu import GPUS

DOCS = Path(__file__).resolve().parents[3] / "docs"
MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --bf16"


def _run(run, *words):
    status, out, err = run("plan", *words)
    assert (status, err) == (0, "")
    return out


class TestShowK:
    def test_common_models_on_all_devices(self, run):
        rows = json.loads(_run(run, "--show-k", "--json"))["rows"]
        assert len(rows) == len(MODELS) * len(SEQUENCES) * len(GPUS)
        for row in rows:
            assert set(row["k"]) == {way.name for way in WAYS}
            stock, cheap, local = row["k"].values()
            assert local < cheap < stock

    def test_where_half_of_the_sets_can_be_offloaded(self, run):
        """What docs/reference/offload-k.md says of "at least half"."""
        rows = json.loads(_run(run, "--show-k", "--seq-length", "8192", "--json"))["rows"]
        k = {(row["model"], row["gpu"]): row["k"] for row in rows}
        papers = {gpu: k["GPT, h 4096", gpu]["local, flash, cheap recompute"] for gpu in GPUS}
        assert papers["A100"] < 2 < papers["H100"]
        assert all(k[model, "A100"]["TE, cheap recompute"] < 2 for model in MODELS)
        assert [m for m in MODELS if k[m, "H100"]["TE"] < 2] == ["Llama 3 405B"]

    def test_of_one_model(self, run):
        words = [*MODEL.split(), "--gpu", "A100", "--pp", "8", "--show-k"]
        data = json.loads(_run(run, *words, "--json"))
        given, stock, cheap, local = data["ways"]
        assert given["inner"] == stock["inner"]
        assert local["inner"]["k"] < cheap["inner"]["k"] < stock["inner"]["k"]
        assert stock["last"]["k"] > stock["first"]["k"] > stock["inner"]["k"]
        inner = stock["inner"]
        assert inner["transfer_ms"] == pytest.approx(2e3 * inner["bytes"] / 15e9)
        assert inner["share"] == pytest.approx(1 / inner["k"])
        text = _run(run, *words)
        assert f"{inner['k']:.2f}" in text and "offloadable" in text

    def test_the_rate_of_the_host_link(self, run):
        words = [*MODEL.split(), "--gpu", "A100", "--show-k", "--json"]
        slow, fast = (
            json.loads(_run(run, *words, "--host-bandwidth", rate))["ways"][1]["inner"]["k"]
            for rate in ("10e9", "20e9")
        )
        assert slow == pytest.approx(2 * fast)
        text = _run(run, "--show-k", "--gpu", "A100", "--host-bandwidth", "25e9")
        assert "A100, as given, 25 GB/s" in text

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--num-layers 4", "plan needs --hidden-size"),
            ("--seq-length 0", "--seq-length must be a whole number"),
            ("--gpu Z80", "unknown GPU 'Z80'"),
            ("--gpu missing.json", "cannot be read"),
        ],
    )
    def test_bad_input(self, run, words, message):
        status, _, err = run("plan", "--show-k", *words.split())
        assert status == 2 and message in err and err.count("\n") == 1


class TestCalibration:
    def test_of_a_device_with_published_passes(self, run):
        data = json.loads(_run(run, "--calibration", "--gpu", "A100", "--json"))
        assert {each["of"] for each in data["errors"]} >= {"fitted", "held out"}
        text = _run(run, "--calibration", "--gpu", "a100")
        for each in data["comparisons"]:
            assert f"{each['published']:.3f}" in text and f"{each['error']:+.1%}" in text

    def test_of_another(self, run):
        text = _run(run, "--calibration", "--gpu", "B200")
        assert "No passes measured on B200 are published here." in text
        assert "(scaled from the A100)" in text

    def test_in_place_of_a_plan_and_without_a_model(self, run):
        status, _, err = run("plan", "--gpu", "A100")
        assert status == 2 and "plan needs --num-layers" in err


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("concepts/pass-times.md", ("--calibration", "--gpu", "A100")),
        ("concepts/pass-times.md", ("--calibration", "--gpu", "H200")),
        ("reference/offload-k.md", ("--show-k",)),
    ],
)
def test_the_pages_show_what_is_printed(run, page, words):
    """The error summary, and the tables of k."""
    text = (DOCS / page).read_text("utf-8")
    out = _run(run, *words)
    start = "our time is longer by" if "--calibration" in words else "TE   "
    blocks = [block for block in text.split("```\n") if start in block]
    assert any(block[block.index(start) :].strip() in out for block in blocks)
