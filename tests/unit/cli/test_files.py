"""Schedule files: written, read back, checked, refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import forward_only, generate
from megatron_ext.schedule.io import load
from megatron_ext.schedule.placement import Placement

from .conftest import options


def test_schedule_file_round_trip(run, tmp_path):
    path = tmp_path / "z.json"
    argv = ["schedule", *options("zb-h1", 4, 6), "--hop", "0.1", "--output", path]
    status, out, _ = run(*argv)
    assert status == 0
    assert out.startswith(f"{path}: zb-h1, pp 4, 72 actions")
    assert load(path).compute().ranks == generate("zb-h1", 4, 6).ranks
    plain = json.loads(run("simulate", *options("zb-h1", 4, 6), "--hop", "0.1", "--json")[1])
    loaded = json.loads(run("simulate", "--schedule", path, "--json")[1])
    for data in (plain, loaded):
        data.pop("generation_seconds")
    assert loaded == plain, "a file keeps its costs"
    assert json.loads(run("simulate", "--schedule", path, "--hop", 0, "--json")[1])["cost"] == {
        "forward": 1,
        "backward_input": 1,
        "backward_weight": 1,
        "hop": 0,
    }


def test_file_and_options_must_agree(run, file_of):
    path = file_of(generate("1f1b", 4, 8))
    assert run("simulate", *options(path, 4, 8))[0] == 0
    status, _, err = run("simulate", *options(path, 8, 8))
    assert status == 2
    assert f"--pp 8 contradicts {path}, which is for pp=4; leave --pp out" in err


@pytest.mark.parametrize("flag", ["--memory-cap 0.5", "--group-size 3"])
def test_a_file_is_not_shaped(run, file_of, flag):
    path = file_of(generate("1f1b", 4, 8))
    status, _, err = run("simulate", "--schedule", path, *flag.split())
    assert status == 2
    assert f"{flag} shapes a generated schedule, but the order in {path} is fixed; leave" in err


def test_an_invalid_file_is_a_negative_answer(run, file_of):
    """Every command that reads it ends with status 1 and the first fault, in the grid."""
    schedule = generate("zb-h1", 2, 2)
    path = file_of(schedule.with_ranks([schedule.ranks[0], ()]))
    for argv in (["simulate", "--schedule", path], ["show", path], ["compare", path]):
        status, out, err = run(*argv)
        assert (status, out) == (1, "")
        assert err.startswith(
            f"megatron-ext {argv[0]}: {path}: rank 1, position 0: F1.0 is missing"
        )
        assert "<-- here" in err


def test_costs_of_other_stages_are_bad_input(run, file_of):
    """The file contradicts itself; its order is not judged."""
    schedule = generate("1f1b", 2, 2)
    path = file_of(replace(schedule, costs=Costs.of(stages=[(1, 1, 1)])))
    status, _, err = run("simulate", "--schedule", path)
    assert status == 2 and "costs are given for 1 stages but pp=2" in err


def test_forward_only_file(run, file_of):
    path = file_of(forward_only(Placement.loop(2), 3))
    assert run("simulate", "--schedule", path)[0] == 0
    assert "F0 F1 F2" in run("show", path)[1]


def test_damaged_files(run, tmp_path):
    path = tmp_path / "s.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", 'expected "format": "megatron-ext-schedule/1", found \'list\''),
        ('{"format": "megatron-ext-schedule/1"}', "lacks pp, chunks"),
    ):
        path.write_text(content)
        status, _, err = run("simulate", "--schedule", path)
        assert status == 2
        assert str(path) in err
        assert message in err
