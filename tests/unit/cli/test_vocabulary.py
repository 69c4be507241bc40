"""Sharded vocabulary layers in the commands."""

from __future__ import annotations

import json

from .conftest import options

VOCABULARY = ["--vocabulary", "0.25,0.125,0.005,0.005,0.02"]
OFFLOAD = ["--offload", "half", "--offload-time", 0.25]


def _data(run, *argv):
    status, out, err = run(*argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_offload_beside_them(run, tmp_path):
    argv = [*options("po", 4, 8), *VOCABULARY]
    alone, data = _data(run, "simulate", *argv), _data(run, "simulate", *argv, *OFFLOAD)
    assert max(data["peak_activation"]) < max(alone["peak_activation"])
    assert data["offloaded_sets"] > 0
    assert data["makespan"] == alone["makespan"] + data["offload_stall"]
    path = tmp_path / "s.json"
    assert run("schedule", *argv, *OFFLOAD, "--lowered", "--output", path)[0] == 0
    status, out, _ = run("check", path)
    assert status == 0 and ": ok" in out
    again = _data(run, "simulate", "--schedule", path)
    assert again["makespan"] == data["makespan"]
    # Of a file with vocabulary passes too.
    plain = tmp_path / "plain.json"
    run("schedule", *argv, "--output", plain)
    assert _data(run, "simulate", "--schedule", plain, *OFFLOAD)["makespan"] == data["makespan"]


def test_auto_with_offload(run):
    argv = [*options("auto", 4, 8), *VOCABULARY, "--memory-cap", 0.8, *OFFLOAD]
    data = _data(run, "simulate", *argv)
    assert data["offloaded_sets"] and data["peak_activation_vs_1f1b"] <= 0.8
