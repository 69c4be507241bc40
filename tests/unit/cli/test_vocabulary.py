"""Sharded vocabulary layers in the commands."""

from __future__ import annotations

from .conftest import answer, options

VOCABULARY = ["--vocabulary", "0.25,0.125,0.005,0.005,0.02"]
OFFLOAD = ["--offload", "half", "--offload-time", 0.25]


def test_microbatches_between_s_and_t(run):
    argv = [*options("1f1b", 4, 8), *VOCABULARY]
    kept = answer(run, "simulate", *argv)["peak_vocabulary_microbatches"]
    text = f"  kept from S to T {max(kept)} microbatches\n    per rank       "
    assert text + " ".join(map(str, kept)) in run("simulate", *argv)[1]
    assert "peak_vocabulary_microbatches" not in answer(run, "simulate", *options("1f1b", 4, 8))
    assert "kept from S" not in run("simulate", *options("1f1b", 4, 8))[1]


def test_offload_beside_them(run, tmp_path):
    argv = [*options("po", 4, 8), *VOCABULARY]
    alone, data = answer(run, "simulate", *argv), answer(run, "simulate", *argv, *OFFLOAD)
    assert max(data["peak_activation"]) < max(alone["peak_activation"])
    assert data["offloaded_sets"] > 0
    assert data["makespan"] == alone["makespan"] + data["offload_stall"]
    path = tmp_path / "s.json"
    assert run("schedule", *argv, *OFFLOAD, "--output", path)[0] == 0
    again = answer(run, "simulate", "--schedule", path)
    assert again["makespan"] == data["makespan"]
    # Of a file with vocabulary passes too.
    plain = tmp_path / "plain.json"
    run("schedule", *argv, "--output", plain)
    assert answer(run, "simulate", "--schedule", plain, *OFFLOAD)["makespan"] == data["makespan"]


def test_other_costs_leave_a_files_vocabulary(run, tmp_path):
    """Its passes still take their time, whichever way the stages' times are given."""
    path, stages = tmp_path / "s.json", tmp_path / "stages.json"
    stages.write_text('{"stages": [[1, 1, 1], [1, 1, 1]]}')
    run("schedule", *options("1f1b", 2, 3), *VOCABULARY, "--output", path)
    made = answer(run, "simulate", "--schedule", path)["makespan"]
    for other in (["--cost", "1,1,1"], ["--stage-cost", stages]):
        assert answer(run, "simulate", "--schedule", path, *other)["makespan"] == made


def test_bound(run):
    """Of the work with that of the rank's parts."""
    argv = [*options("zb-h2", 4, 8), *VOCABULARY]
    data = answer(run, "simulate", *argv)
    assert data["bound_kind"] == "work" and 0 < data["above_bound"] < 0.03
    assert data["lower_bound"] > 8 * 3.385


def test_auto_with_offload(run):
    argv = [*options("auto", 4, 8), *VOCABULARY, "--memory-cap", 0.8, *OFFLOAD]
    data = answer(run, "simulate", *argv)
    assert data["offloaded_sets"] and data["peak_activation_vs_1f1b"] <= 0.8
