"""``simulate``, and how the options of a schedule reach its generator."""

from __future__ import annotations

import json

import pytest

from megatron_ext.schedule.generators import NAMES, generate
from megatron_ext.schedule.io import load

from .conftest import FIELDS, options


def test_simulate_json_is_the_contract(run):
    status, out, err = run("simulate", *options("1f1b", 4, 8), "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert list(data) == FIELDS
    assert data.pop("generation_seconds") >= 0
    assert data == {
        "schedule": "1f1b",
        "pp": 4,
        "chunks": 1,
        "microbatches": 8,
        "cost": {"forward": 1, "backward_input": 1, "backward_weight": 1, "hop": 0},
        "makespan": 33,
        "bubble": pytest.approx(3 / 11),
        "span_bubble": pytest.approx(3 / 11),
        "peak_activation": [4, 3, 2, 1],
        "peak_activation_vs_1f1b": 1,
        "lower_bound": 33,
        "bound_kind": "way",
        "above_bound": 0,
    }
    assert '"makespan": 33,' in out, "whole numbers are ints"


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_simulates(run, name):
    data = json.loads(run("simulate", *options(name, 4, 8), "--json")[1])
    assert data["schedule"] == name
    assert len(data["peak_activation"]) == 4
    assert data["bubble"] == pytest.approx(1 - 24 / data["makespan"])
    assert data["peak_activation_vs_1f1b"] == max(data["peak_activation"]) / 4


def test_costs_and_hop(run):
    argv = ["simulate", *options("1f1b", 2, 1), "--json", "--cost"]
    data = json.loads(run(*argv, "1,2,0.5,0.25")[1])
    assert data["cost"] == {
        "forward": 1,
        "backward_input": 2,
        "backward_weight": 0.5,
        "hop": 0.25,
    }
    assert data["makespan"] == 2 * 3.5 + 2 * 0.25
    assert json.loads(run(*argv, "1,2,0.5,0.25", "--hop", "1")[1])["makespan"] == 9
    assert json.loads(run(*argv[:-1], "--hop", "0.5")[1])["makespan"] == 7


def test_stage_costs(run, tmp_path):
    path = tmp_path / "stages.json"
    path.write_text('{"stages": [[1, 1, 1], [2, 2, 2]]}')
    argv = ["simulate", *options("1f1b", 2, 1), "--stage-cost", path]
    assert json.loads(run(*argv, "--json")[1])["makespan"] == 9
    assert "costs per stage" in run(*argv)[1]
    status, _, err = run("simulate", *options("1f1b", 4, 1), "--stage-cost", path)
    assert status == 2
    assert "costs are given for 2 stages but pp=4 x chunks=1 has 4" in err


def test_simulate_table(run):
    status, out, _ = run("simulate", *options("interleaved", 4, 8))
    assert status == 0
    for line in (
        "interleaved: pp 4, chunks 2, microbatches 8; costs F 1, B 1, W 1, hop 0",
        "makespan         28.5",
        "bubble           15.789 %",
        "peak activation  5.5 microbatches, 137.5 % of 1F1B's 4",
        "per rank       5.5 4.5 3.5 2.5",
    ):
        assert line in out


def test_chunks(run):
    argv = ["simulate", *options("interleaved", 4, 8), "--json", "--chunks"]
    assert json.loads(run(*argv, "4")[1])["chunks"] == 4
    assert run(*argv, "1")[0] == 2


def test_group_size_reaches_the_generator(run, tmp_path):
    path = tmp_path / "s.json"
    argv = ["schedule", *options("gis", 4, 8), "--group-size", 3, "--output", path]
    assert run(*argv)[0] == 0
    assert load(path).ranks == generate("gis", 4, 8, group_size=3).ranks


def test_memory_cap_reaches_the_generator_in_sets(run, tmp_path):
    """Half of 1F1B's peak at p=8 with two chunks a rank is 8 sets."""
    path = tmp_path / "s.json"
    argv = [*options("v-cap", 8, 8), "--memory-cap", 0.5]
    assert run("schedule", *argv, "--output", path)[0] == 0
    assert load(path).ranks == generate("v-cap", 8, 8, memory_cap=8).ranks
    assert json.loads(run("simulate", *argv, "--json")[1])["peak_activation_vs_1f1b"] <= 0.5


def test_auto_says_why(run):
    argv = ["simulate", *options("auto", 4, 8), "--memory-cap", 0.5]
    data = json.loads(run(*argv, "--json")[1])
    assert list(data) == [*FIELDS, "note"]
    assert data["peak_activation_vs_1f1b"] <= 0.5
    assert data["note"].startswith(f"{data['schedule']} is the fastest of")
    assert f"  chosen because   {data['note']}\n" in run(*argv)[1]
