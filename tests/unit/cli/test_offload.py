"""``--offload``: in tables, JSON and files, and with a cap."""

from __future__ import annotations

import json

import pytest

from .conftest import FIELDS, options

OFFLOAD = ["--offload", "half", "--offload-time", "0.25"]


def test_offload_json_is_the_contract(run):
    data = json.loads(run("simulate", *options("po", 4, 16), "--json", *OFFLOAD)[1])
    fields = ["peak_host_activation", "offloaded_sets", "offload_stall", "note"]
    assert list(data) == FIELDS + fields
    assert data["peak_host_activation"] == [2.5, 2.5, 2, 2]
    assert data["peak_activation"] == [1.5, 1.5, 1, 1]
    assert (data["offloaded_sets"], data["offload_stall"]) == (64, 0)
    assert data["note"].startswith("64 activation sets are offloaded; 64 stay")
    argv = ["simulate", *options("po", 4, 16), "--json", "--offload"]
    assert list(json.loads(run(*argv, "off")[1])) == FIELDS
    nothing = json.loads(run(*argv, "0", "--offload-time", 1)[1])
    assert nothing["peak_host_activation"] == [0, 0, 0, 0]
    assert nothing["offloaded_sets"] == nothing["offload_stall"] == 0


def test_offload_table(run):
    out = run("simulate", *options("po", 4, 16), *OFFLOAD)[1]
    assert "  offloaded        64 activation sets, stall 0\n" in out
    assert "  note             64 activation sets are offloaded; 64 stay" in out


def test_offload_goes_into_the_file(run, tmp_path):
    path = tmp_path / "s.json"
    made = run("schedule", *options("v-half", 4, 8), *OFFLOAD, "--output", path)
    assert made[0] == 0
    data = json.loads(path.read_text())
    assert data["offload"]["to_host"] == data["offload"]["to_device"] == [0.25] * 4
    ops = {text.rstrip("0123456789.") for row in data["ranks"] for text in row}
    assert {"OFFLOAD", "RELEASE", "PREPARE", "RELOAD", "F", "B", "W"} <= ops
    ours = json.loads(run("simulate", *options("v-half", 4, 8), *OFFLOAD, "--json")[1])
    theirs = json.loads(run("simulate", "--schedule", path, "--json")[1])
    for field in ("makespan", "peak_activation", "peak_host_activation", "offloaded_sets"):
        assert ours[field] == theirs[field]
    plain = json.loads(run("simulate", "--schedule", path, "--json", "--offload", "off")[1])
    assert "offloaded_sets" not in plain


@pytest.mark.matrix
def test_a_cap_is_of_what_stays_on_the_device(run):
    """v-half's block needs 10 of 16 sets; v-cap alone not less than 8."""
    argv = ["simulate", "--json", "--offload", "auto", "--offload-time", "0.25"]
    for name in ("v-half", "v-cap", "po"):
        data = json.loads(run(*argv, *options(name, 8, 16), "--memory-cap", "0.25")[1])
        assert max(data["peak_activation"]) <= 2
        assert data["offload_stall"] == 0
