"""The command line: contract fields, files, and what bad input gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_ext import __version__, cli
from megatron_ext.commands import compare, schedule, show, simulate
from megatron_ext.commands.common import Parser
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import NAMES, forward_only, generate
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule

FIELDS = [
    "schedule",
    "pp",
    "chunks",
    "microbatches",
    "cost",
    "makespan",
    "bubble",
    "span_bubble",
    "peak_activation",
    "peak_activation_vs_1f1b",
    "generation_seconds",
]


@pytest.fixture
def run(capsys):
    """Run one command in this process: (exit status, stdout, stderr)."""

    def run(*argv):
        try:
            status = cli.main([str(arg) for arg in argv])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def _options(name, pp, m):
    return ["--schedule", name, "--pp", pp, "--microbatches", m]


@pytest.fixture
def file_of(tmp_path):
    """A saved schedule's path."""

    def file_of(schedule):
        path = tmp_path / "schedule.json"
        schedule.save(path)
        return path

    return file_of


def test_simulate_json_is_the_contract(run):
    status, out, err = run("simulate", *_options("1f1b", 4, 8), "--json")
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
    }
    assert '"makespan": 33,' in out, "whole numbers are ints"


OFFLOAD = ["--offload", "half", "--offload-time", "0.25"]


def test_offload_json_is_the_contract(run):
    data = json.loads(run("simulate", *_options("po", 4, 16), "--json", *OFFLOAD)[1])
    fields = ["peak_host_activation", "offloaded_sets", "offload_stall", "note"]
    assert list(data) == FIELDS + fields
    assert data["peak_host_activation"] == [2.5, 2.5, 2, 2]
    assert data["peak_activation"] == [1.5, 1.5, 1, 1]
    assert (data["offloaded_sets"], data["offload_stall"]) == (64, 0)
    assert data["note"].startswith("64 activation sets are offloaded; 64 stay")
    argv = ["simulate", *_options("po", 4, 16), "--json", "--offload"]
    assert list(json.loads(run(*argv, "off")[1])) == FIELDS
    nothing = json.loads(run(*argv, "0", "--offload-time", 1)[1])
    assert nothing["peak_host_activation"] == [0, 0, 0, 0]
    assert nothing["offloaded_sets"] == nothing["offload_stall"] == 0


def test_offload_table(run):
    out = run("simulate", *_options("po", 4, 16), *OFFLOAD, "--offload-transfer", "dual")[1]
    assert "  offloaded        64 activation sets, stall 0\n" in out
    assert "  note             64 activation sets are offloaded; 64 stay" in out


def test_offload_goes_into_the_file(run, tmp_path):
    path = tmp_path / "s.json"
    made = run("schedule", *_options("v-half", 4, 8), *OFFLOAD, "--lowered", "--output", path)
    assert made[0] == 0
    data = json.loads(path.read_text())
    assert data["offload"]["transfer"] == "single"
    assert data["offload"]["to_host"] == data["offload"]["to_device"] == [0.25] * 4
    ops = {text.rstrip("0123456789.") for row in data["ranks"] for text in row}
    assert {"OFFLOAD", "RELEASE", "PREPARE", "RELOAD", "SEND_F", "F", "B", "W"} <= ops
    assert "activation sets offloaded: each there and back" in run("check", path)[1]
    ours = json.loads(run("simulate", *_options("v-half", 4, 8), *OFFLOAD, "--json")[1])
    theirs = json.loads(run("simulate", "--schedule", path, "--json")[1])
    for field in ("makespan", "peak_activation", "peak_host_activation", "offloaded_sets"):
        assert ours[field] == theirs[field]
    plain = json.loads(run("simulate", "--schedule", path, "--json", "--offload", "off")[1])
    assert "offloaded_sets" not in plain


def test_a_cap_is_of_what_stays_on_the_device(run):
    """v-half's block needs 10 of 16 sets; v-cap alone not less than 8."""
    argv = ["simulate", "--json", "--offload", "auto", "--offload-time", "0.25"]
    for name in ("v-half", "v-cap", "po"):
        data = json.loads(run(*argv, *_options(name, 8, 16), "--memory-cap", "0.25")[1])
        assert max(data["peak_activation"]) <= 2
        assert data["offload_stall"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_simulates(run, name):
    data = json.loads(run("simulate", *_options(name, 4, 8), "--json")[1])
    assert data["schedule"] == name
    assert len(data["peak_activation"]) == 4
    assert data["bubble"] == pytest.approx(1 - 24 / data["makespan"])
    assert data["peak_activation_vs_1f1b"] == max(data["peak_activation"]) / 4


def test_costs_and_hop(run):
    argv = ["simulate", *_options("1f1b", 2, 1), "--json", "--cost"]
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
    argv = ["simulate", *_options("1f1b", 2, 1), "--stage-cost", path]
    assert json.loads(run(*argv, "--json")[1])["makespan"] == 9
    assert "costs per stage" in run(*argv)[1]
    status, _, err = run("simulate", *_options("1f1b", 4, 1), "--stage-cost", path)
    assert status == 2
    assert "costs are given for 2 stages but pp=4 x chunks=1 has 4" in err


def test_simulate_table(run):
    status, out, _ = run("simulate", *_options("interleaved", 4, 8))
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
    argv = ["simulate", *_options("interleaved", 4, 8), "--json", "--chunks"]
    assert json.loads(run(*argv, "4")[1])["chunks"] == 4
    assert run(*argv, "1")[0] == 2


@pytest.mark.parametrize("lowered", [False, True])
def test_schedule_file_round_trip(run, tmp_path, lowered):
    path = tmp_path / "z.json"
    argv = ["schedule", *_options("zb-h1", 4, 6), "--hop", "0.1", "--output", path]
    status, out, _ = run(*argv, *(["--lowered"] if lowered else []))
    assert status == 0
    assert out.startswith(f"{path}: zb-h1, pp 4, {144 if lowered else 72} actions")
    assert Schedule.load(path).is_lowered is lowered
    assert Schedule.load(path).compute().ranks == generate("zb-h1", 4, 6).ranks
    plain = json.loads(run("simulate", *_options("zb-h1", 4, 6), "--hop", "0.1", "--json")[1])
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
    assert run("simulate", *_options(path, 4, 8))[0] == 0
    status, _, err = run("simulate", *_options(path, 8, 8))
    assert status == 2
    assert f"--pp 8 contradicts {path}, which is for pp=4; leave --pp out" in err


@pytest.mark.parametrize("flag", ["--memory-cap 0.5", "--group-size 3", "--objective span"])
def test_a_file_is_not_shaped(run, file_of, flag):
    path = file_of(generate("1f1b", 4, 8))
    status, _, err = run("simulate", "--schedule", path, *flag.split())
    assert status == 2
    assert f"{flag} shapes a generated schedule, but the order in {path} is fixed; leave" in err


def test_group_size_and_objective_reach_the_generator(run, tmp_path):
    path = tmp_path / "s.json"
    argv = ["schedule", *_options("gis", 4, 8), "--group-size", 3, "--output", path]
    assert run(*argv)[0] == 0
    assert Schedule.load(path).ranks == generate("gis", 4, 8, group_size=3).ranks
    cost = "1,1.3,0.6"
    argv = [*_options("zb-h2", 4, 8), "--cost", cost, "--output", path, "--objective", "span"]
    assert run("schedule", *argv)[0] == 0
    made = generate("zb-h2", 4, 8, costs=Costs.parse(cost), objective="span")
    assert Schedule.load(path).ranks == made.ranks


def test_memory_cap_reaches_the_generator_in_sets(run, tmp_path):
    """Half of 1F1B's peak at p=8 with two chunks a rank is 8 sets."""
    path = tmp_path / "s.json"
    argv = [*_options("v-cap", 8, 8), "--memory-cap", 0.5]
    assert run("schedule", *argv, "--output", path)[0] == 0
    assert Schedule.load(path).ranks == generate("v-cap", 8, 8, memory_cap=8).ranks
    assert json.loads(run("simulate", *argv, "--json")[1])["peak_activation_vs_1f1b"] <= 0.5


def test_auto_says_why(run):
    argv = ["simulate", *_options("auto", 4, 8), "--memory-cap", 0.5]
    data = json.loads(run(*argv, "--json")[1])
    assert list(data) == [*FIELDS, "note"]
    assert data["peak_activation_vs_1f1b"] <= 0.5
    assert data["note"].startswith(f"{data['schedule']} is the fastest of")
    assert f"  chosen because   {data['note']}\n" in run(*argv)[1]


def _compare(run, *argv):
    status, out, err = run("compare", "--json", *argv)
    assert (status, err) == (0, "")
    return json.loads(out)


def test_compare_json_is_the_contract(run):
    argv = ["--pp", 2, "--microbatches", 3, "--cost", "1,1.1,0.8", "--hop", 0.1]
    data = _compare(run, *argv)
    assert list(data) == ["pp", "microbatches", "cost", "schedules", "impossible"]
    assert (data["pp"], data["microbatches"], data["impossible"]) == (2, 3, [])
    assert data["cost"]["backward_weight"] == 0.8
    rows = data["schedules"]
    assert [row["makespan"] for row in rows] == sorted(row["makespan"] for row in rows)
    assert {row["schedule"] for row in rows} == set(NAMES)
    for row in rows:
        assert list(row) == FIELDS
        alone = ["simulate", "--json", "--schedule", row["schedule"], *argv]
        expected = json.loads(run(*alone)[1])
        assert row | {"generation_seconds": 0} == expected | {"generation_seconds": 0}


def test_compare_marks_what_exceeds_the_cap(run):
    data = _compare(run, "--pp", 4, "--microbatches", 8, "--memory-cap", 0.75)
    assert data["memory_cap"] == 0.75
    for row in data["schedules"]:
        assert row["over_cap"] is (row["peak_activation_vs_1f1b"] > 0.75)
    assert {row["over_cap"] for row in data["schedules"]} == {True, False}
    out = run("compare", "--pp", 4, "--microbatches", 8, "--memory-cap", 0.75)[1]
    marked = {line.split()[0] for line in out.splitlines() if line.endswith("  over the cap")}
    assert marked == {row["schedule"] for row in data["schedules"] if row["over_cap"]}


def test_compare_lists_the_impossible_with_the_reason(run, tmp_path):
    path = tmp_path / "stages.json"
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 4}))
    argv = ["--pp", 2, "--microbatches", 4, "--stage-cost", path]
    assert _compare(run, *argv)["impossible"] == [], "one stage of 1f1b is two of the V's"
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 2}))
    reasons = {row["schedule"]: row["reason"] for row in _compare(run, *argv)["impossible"]}
    assert "for 2 stages but pp=2 x chunks=2 has 4" in reasons["v-half"]
    out = run("compare", *argv)[1]
    assert "not possible here:\n  interleaved: costs are given for 2 stages" in out
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 3}))
    status, _, err = run("compare", *argv)
    assert status == 2
    assert "no schedule is possible here; 1f1b, for one: costs are given for 3 stages" in err


def test_compare_chunks_are_for_what_takes_any(run):
    rows = _compare(run, "--pp", 2, "--microbatches", 4, "--chunks", 3)["schedules"]
    chunks = {row["schedule"]: row["chunks"] for row in rows}
    assert (chunks["1f1b"], chunks["v-half"], chunks["interleaved"], chunks["po"]) == (1, 2, 3, 3)


def test_compare_group_size_and_objective(run):
    argv = ["--pp", 4, "--microbatches", 8, "--cost", "1,0.9,0.6", "--hop", 0.1]
    data = _compare(run, *argv, "--group-size", 3, "--objective", "span")
    head = ["pp", "microbatches", "cost", "group_size", "objective", "schedules", "impossible"]
    assert list(data) == head
    assert (data["group_size"], data["objective"]) == (3, "span")
    rows = {row["schedule"]: row for row in data["schedules"]}
    spans = [row["span_bubble"] for row in data["schedules"]]
    assert spans == sorted(spans), "fastest by the objective first"
    for name, more in (("gis", ["--group-size", 3]), ("zb-h2", []), ("v-half", [])):
        alone = ["simulate", "--json", "--schedule", name, *argv, "--objective", "span", *more]
        expected = json.loads(run(*alone)[1])
        assert rows[name] | {"generation_seconds": 0} == expected | {"generation_seconds": 0}
    out = run("compare", *argv, "--group-size", 3, "--objective", "span")[1]
    assert "hop 0.1; gis in groups of 3; objective span\n" in out


def test_the_commands_share_their_options():
    """What shapes a schedule is spelled and explained alike wherever one is made."""
    commands = Parser().add_subparsers()
    for module in (compare, schedule, show, simulate):
        module.add(commands)
    choices = commands.choices
    for flag in ("--cost", "--hop", "--stage-cost", "--chunks", "--objective"):
        helps = {
            choices[name]._option_string_actions[flag].help
            for name in ("simulate", "schedule", "show", "compare")
        }
        assert len(helps) == 1, flag
    for flag in ("--memory-cap", "--group-size"):
        for name in ("simulate", "schedule", "show", "compare"):
            assert flag in choices[name]._option_string_actions


def test_show_block(run, tmp_path):
    """One stamped block, its repetition, and squeezed: what docs/05 draws."""
    argv = ["show", "--block", "v-half", "--pp", 4]
    status, out, _ = run(*argv)
    assert status == 0
    assert "a microbatch every 6, which holds 3 at most (1F1B 4)" in out
    assert "rank 3 |..................F0 f0 ....................................b0 w0 B0 W0" in out
    out = run(*argv, "--microbatches", 6)[1]
    assert "peak activation per rank, in microbatches (1F1B: 4): 3 3 3 3" in out
    out = run(*argv, "--microbatches", 6, "--squeeze")[1]
    assert "makespan 48, bubble 25 %" in out
    assert "peak activation per rank, in microbatches (1F1B: 4): 3 3 3 3" in out
    for suffix in (".svg", ".html", ".json", ".txt"):
        path = tmp_path / f"block{suffix}"
        assert run(*argv, "--output", path)[0] == 0
        assert "block of v-half" in path.read_text()


def test_compare_table(run):
    out = run("compare", "--pp", 4, "--microbatches", 8)[1].splitlines()
    assert out[0] == "pp 4, microbatches 8; costs F 1, B 1, W 1, hop 0"
    head = "schedule chunks bubble span bubble makespan peak of 1F1B's made in"
    assert out[2].split() == head.split()
    row = next(line for line in out if line.startswith("1f1b")).split()
    assert row[:-2] == ["1f1b", "1", "27.27", "%", "27.27", "%", "33", "4", "100.0", "%"]


def test_check_says_what_it_verified(run, tmp_path):
    path = tmp_path / "z.json"
    run("schedule", *_options("1f1b", 4, 8), "--output", path)
    status, out, _ = run("check", path)
    assert status == 0
    assert f"{path}: 1f1b, pp 4, chunks 1, microbatches 8, 64 actions: ok" in out
    assert "lowered to 48 transfers: complete" in out
    assert "peak activation per rank, in microbatches: 4 3 2 1" in out
    run("schedule", *_options("1f1b", 4, 8), "--lowered", "--output", path)
    status, out, _ = run("check", path)
    assert status == 0
    assert "the file's transfers: complete" in out


def test_check_refuses_with_the_grid(run, file_of):
    schedule = generate("zb-h1", 2, 2)
    status, out, err = run("check", path := file_of(schedule.with_ranks([schedule.ranks[0], ()])))
    assert (status, out) == (2, "")
    assert err.startswith(f"megatron-ext check: {path}: rank 1, position 0: F1.0 is missing")
    assert "<-- here" in err


def test_a_file_that_cannot_run_is_refused_everywhere(run, file_of):
    schedule = generate("1f1b", 2, 2)
    path = file_of(schedule.with_ranks([tuple(reversed(row)) for row in schedule.ranks]))
    for argv in (["simulate", "--schedule", path], ["show", path], ["check", path]):
        status, _, err = run(*argv)
        assert status == 2, argv
        assert str(path) in err


def test_forward_only_file(run, file_of):
    path = file_of(forward_only(Placement.loop(2), 3))
    status, out, _ = run("check", path)
    assert status == 0
    assert "6 actions, forward only: ok" in out
    assert "F0 F1 F2" in run("show", path)[1]


def test_csv_files(run, tmp_path):
    """A schedule in torch's form is one wherever a file is read; it keeps no costs."""
    path = tmp_path / "s.csv"
    argv = [*_options("v-half", 4, 8), "--cost", "1,1.2,0.8", "--output", path]
    assert run("schedule", *argv)[1] == f"{path}: v-half, pp 4, 192 actions\n"
    assert Schedule.load(path).ranks == generate("v-half", 4, 8, costs=Costs.of(1, 1.2, 0.8)).ranks
    assert "file, pp 4, chunks 2, microbatches 8, 192 actions: ok" in run("check", path)[1]
    assert run("show", path)[1].startswith("file (planned): pp 4, chunks 2")
    loaded = json.loads(run("simulate", "--schedule", path, "--json", "--cost", "1,1.2,0.8")[1])
    made = json.loads(run("simulate", *argv[:-2], "--json")[1])
    changed = {"schedule": "file", "generation_seconds": 0}
    assert loaded | changed == made | changed
    status, _, err = run("schedule", *argv, "--lowered")
    assert status == 2
    assert "CSV compute form has no transfers; leave --lowered out" in err
    path.write_text("0F0,0B0\n1F0,1B\n")
    for argv in (["check", path], ["show", path], ["simulate", "--schedule", path]):
        status, _, err = run(*argv)
        assert status == 2
        assert f"{path}: row 2, column 2, cell '1B': expected stage" in err


def test_show_text(run):
    status, out, _ = run("show", *_options("1f1b", 2, 4))
    assert status == 0
    assert "rank 1 |...F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- ......|\n" in out
    narrow = run("show", *_options("1f1b", 2, 4), "--width", 40)[1]
    assert max(len(line) for line in narrow.splitlines() if line.startswith("rank")) == 40


def test_show_writes_what_the_suffix_says(run, tmp_path):
    argv = ["show", *_options("zb-h1", 4, 8), "--output"]
    for suffix in (".svg", ".html", ".json", ".txt"):
        path = tmp_path / f"timeline{suffix}"
        status, out, _ = run(*argv, path)
        assert (status, out) == (0, f"{path}: zb-h1, pp 4, makespan 27\n")
    assert ElementTree.parse(tmp_path / "timeline.svg").getroot().tag.endswith("svg")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 4 * 24
    assert (tmp_path / "timeline.txt").read_text().startswith("zb-h1 (planned)")


_PO = "simulate --schedule po --pp 4 --microbatches 8"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("simulate", "the following arguments are required: --schedule"),
        ("simulate --schedule nope --pp 4 --microbatches 8", "unknown schedule 'nope'; give one"),
        ("simulate --schedule 1f1b", "--schedule 1f1b needs --pp and --microbatches too"),
        ("simulate --schedule 1f1b --pp 0 --microbatches 8", "whole number >= 1, got '0'"),
        ("simulate --schedule 1f1b --pp 1 --microbatches 8", "at least 2 pipeline ranks, got pp=1"),
        ("simulate --schedule 1f1b --pp x --microbatches 8", "whole number >= 1, got 'x'"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost 1,2", "got '1,2'"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost 1,1,0", "cost W must be > 0"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --hop 1e400", "must not exceed 1e+12"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --hop -1", "cost hop must be >= 0"),
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --group-size 3", "--group-size"),
        (
            "simulate --schedule 1f1b --pp 4 --microbatches 8 --memory-cap 0.5",
            "1f1b has none; leave --memory-cap out",
        ),
        (
            "simulate --schedule gis --pp 4 --microbatches 8 --group-size 5",
            "gis at pp=4 takes a group size from 2 (p/2 rounded up) to 4 (p), got 5",
        ),
        ("simulate --schedule gis --pp 4 --microbatches 8 --objective x", "invalid choice: 'x'"),
        (f"{_PO} --offload half", "--offload half needs --offload-time T too"),
        (f"{_PO} --offload-time 0.25", "--offload-time 0.25 is for --offload; give both"),
        (f"{_PO} --offload off --offload-transfer dual", "dual is for --offload; give both"),
        (f"{_PO} --offload 3 --offload-time 1", "cannot offload 3 chunks of a rank that has 2"),
        (f"{_PO} --offload most --offload-time 1", "must be off, half, full, auto or a number"),
        (f"{_PO} --offload half --offload-time 0", "an offload time must be a number > 0"),
        (f"{_PO} --offload half --offload-time 1,2,3", "--offload-time must be T or T,T2"),
        (f"{_PO} --offload half --offload-time 1 --offload-transfer x", "invalid choice: 'x'"),
        (
            f"{_PO} --offload auto --offload-time 0.25 --memory-cap 0.13",
            "activation sets on a device, but the cap is 1; raise --memory-cap to 0.25",
        ),
        (
            "schedule --schedule po --pp 4 --microbatches 8 --output a.json --offload half "
            "--offload-time 1",
            "--offload half needs --lowered too",
        ),
        (
            "show --block v-half --pp 4 --offload half",
            "--offload half is not for --block v-half",
        ),
        ("compare --pp 4", "the following arguments are required: --microbatches"),
        ("compare --pp 1 --microbatches 8", "needs at least 2 ranks, got --pp 1"),
        ("compare --pp 4 --microbatches 8 --memory-cap 40GiB", "such as 0.5, got '40GiB'"),
        ("compare --pp 4 --microbatches 8 --memory-cap 0", "a number > 0 such as 0.5, got '0'"),
        ("compare --pp 4 --microbatches 8 --memory-cap nan", "got 'nan'"),
        ("compare --pp 4 --microbatches 8 --hop 1e400", "must not exceed 1e+12"),
        ("simulate --sched 1f1b --pp 4 --microbatches 8", "required: --schedule"),
        ("simulate --schedule gone.json", "cannot read schedule file gone.json: No such file"),
        ("check gone.json", "cannot read schedule file gone.json: No such file or directory"),
        ("compare --pp 4 --microbatches 8 --group-size 5", "at pp=4 takes 2 (p/2 rounded up) to 4"),
        ("show", "give either a schedule file or --schedule NAME"),
        ("show a.json --block v-half", "give either a schedule file or --schedule NAME or --block"),
        ("show --block v-half", "--block v-half needs --pp P, at least 2 pipeline ranks"),
        ("show --block v-half --pp 4 --hop 1", "--hop 1 is not for --block v-half, which is the"),
        ("show --schedule v-half --pp 4 --microbatches 4 --squeeze", "--squeeze is for --block"),
        ("show a.json --schedule 1f1b", "give either a schedule file or --schedule NAME"),
        ("show --schedule 1f1b --pp 2 --microbatches 2 --output a.pdf", "use .svg, .html, .json"),
        (
            "schedule --schedule 1f1b --pp 2 --microbatches 2 --output no/such/dir/a.json",
            "cannot write no/such/dir/a.json: No such file or directory",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, argv, message):
    status, out, err = run(*argv.split())
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("megatron-ext")
    assert err.count("\n") == 1


def test_damaged_files(run, tmp_path):
    path = tmp_path / "s.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", 'expected "format": "megatron-ext-schedule/1", found \'list\''),
        ('{"format": "megatron-ext-schedule/1"}', "lacks pp, chunks"),
    ):
        path.write_text(content)
        status, _, err = run("check", path)
        assert status == 2
        assert str(path) in err
        assert message in err


def test_a_bug_stays_a_traceback(monkeypatch):
    def broken(schedule):
        raise ValueError("a bug")

    monkeypatch.setattr(simulate, "simulate", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["simulate", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2"])


def test_version(run):
    assert run("--version") == (0, f"megatron-ext {__version__}\n", "")


def test_a_reader_that_leaves_is_no_error(repo_root):
    command = [sys.executable, "-m", "megatron_ext"]
    command += ["show", "--schedule", "1f1b", "--pp", "8", "--microbatches", "4000"]
    # Unbuffered, Python drops the rest of a write that a pipe took in part, and never notices.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, cwd=repo_root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""
