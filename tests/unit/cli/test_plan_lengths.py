"""``plan --microbatch-cost``: the answers with microbatches of other lengths."""

from __future__ import annotations

import json

import pytest

MODEL = (
    "--gpu A100 --pp 4 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --bf16 --swiglu "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --world-size 4 "
    "--vocab-size 32000 --effort 0.02 --schedules 1f1b --shard-vocabulary off --offload off "
)


@pytest.fixture
def plan(run):
    def plan(*more):
        status, out, err = run("plan", *MODEL.split(), *more)
        return status, out, err

    return plan


def test_lengths_from_a_file(plan, tmp_path, run):
    """The numbers of simulate, with the same costs; long microbatches in the middle are faster."""
    file = tmp_path / "lengths.txt"
    file.write_text("tokens\n8000\n2000\n1000\n500\n4000\n300\n9000\n4000\n")
    _, out, _ = plan("--microbatch-cost", str(file), "--json")
    data = json.loads(out)
    (first, *_), best = data["lengths"], data["chosen"]
    assert first["reordered_ms"] < first["lengths_ms"]
    assert first["lengths_ms"] > first["iteration_ms"]
    stages = tmp_path / "stages.json"
    row = next(r for r in data["front"] if r["iteration_ms"] == first["iteration_ms"])
    stages.write_text(json.dumps(row["stage_cost"]))
    words = [str(stages) if word == "STAGE_COST_FILE" else word for word in row["simulate"]]
    attention = str(4096 / (12 * 1024 + 4096))
    more = ["--microbatch-cost", str(file), "--attention-share", attention]
    _, out, _ = run("simulate", *words, *more, "--json")
    again = json.loads(out)["makespan"] / 1e3 + first["iteration_ms"] - row["step_ms"]
    assert again == pytest.approx(first["lengths_ms"])
    assert best["schedule"] == "1f1b"


def test_equal_lengths_change_nothing(plan):
    _, out, _ = plan("--microbatch-cost", ",".join(["2"] * 8), "--json")
    for row in json.loads(out)["lengths"]:
        assert row["lengths_ms"] == pytest.approx(row["reordered_ms"])
        assert row["lengths_ms"] > 1.9 * row["iteration_ms"] - 1
    _, out, _ = plan("--microbatch-cost", ",".join(["1"] * 8))
    assert "with microbatches of 1,1,1,1,1,1,1,1, of the points above:\n  1f1b, 1 chunks" in out


def test_another_number_of_microbatches(plan):
    status, _, err = plan("--microbatch-cost", "1,2,3")
    assert status == 2 and "'1,2,3' has 3 microbatches, but the answers have 8" in err
    status, _, err = plan("--microbatch-cost", "none.txt")
    assert status == 2 and "--microbatch-cost none.txt" in err
