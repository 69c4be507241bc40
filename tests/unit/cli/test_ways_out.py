"""What cannot be done ends in one sentence, soon, and names what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_ext.schedule.actions import parse
from megatron_ext.schedule.generators import GENERATORS

from .conftest import options


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("simulate --schedule v-half --pp 100000 --microbatches 8", "about 1.6e+03 s"),
        ("simulate --schedule auto --pp 8 --microbatches 100000", "of more than 60 s"),
        ("show v-half --pp 60000 --microbatches 8", "give fewer microbatches or ranks"),
        ("simulate --schedule 1f1b --pp 64 --microbatches 99 --slices 650", "of 650 slices"),
        ("compare --pp 100000 --microbatches 8", "would take about"),
        (
            "simulate --schedule 1f1b --pp 8 --microbatches 64 --jitter 0.1 --runs 99999999",
            "give fewer --runs",
        ),
    ],
)
def test_sizes_that_would_take_for_ever_are_refused(run, line, words):
    status, out, err = run(*line.split())
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_keys_that_nothing_reads_are_named(run, tmp_path):
    path = tmp_path / "one.json"
    run("schedule", *options("zb-h1", 4, 8), "--output", path)
    data = json.loads(path.read_text())
    for changed, words in (
        ({**data, "costs": data["cost"]}, "no field 'costs'; did you mean cost?"),
        ({**data, "cost": {**data["cost"], "hopp": 1}}, "\"cost\" has no field 'hopp'"),
    ):
        path.write_text(json.dumps(changed))
        status, _, err = run("check", path)
        assert status == 2 and words in err
    stages = tmp_path / "stages.json"
    stages.write_text('{"stages": [[1, 1, 1]], "exchanges": []}')
    status, _, err = run("simulate", *options("1f1b", 4, 8), "--stage-cost", stages)
    assert status == 2 and "no field 'exchanges'; did you mean exchange?" in err


def test_an_invalid_order_is_a_negative_answer(run, tmp_path):
    path = tmp_path / "one.json"
    run("schedule", *options("zb-h1", 4, 8), "--output", path)
    data = json.loads(path.read_text())
    data["ranks"][0].reverse()
    path.write_text(json.dumps(data))
    assert run("check", path)[0] == 1
    path.write_text("{")
    assert run("check", path)[0] == 2


def test_standard_input_is_a_file(run, tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    run("schedule", *options("zb-h1", 4, 8), "--output", path)
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        status, out, _ = run("check", "-")
    assert status == 0 and out.startswith("-: zb-h1, pp 4")


def test_files_are_compared(run, tmp_path):
    path = tmp_path / "mine.json"
    run("schedule", *options("zb-h1", 4, 8), "--cost", "1,1.1,0.8", "--output", path)
    status, out, _ = run("compare", path, "--effort", "0.02", "--json")
    data = json.loads(out)
    assert status == 0 and (data["pp"], data["microbatches"]) == (4, 8)
    assert data["cost"]["backward_input"] == 1.1, "of the file, for all rows"
    rows = {row["schedule"]: row for row in data["schedules"]}
    mine, made = rows[str(path)], rows["zb-h1"]
    assert (
        mine["makespan"] == made["makespan"] and mine["peak_activation"] == made["peak_activation"]
    )
    status, out, _ = run("compare", path, "--effort", "0.02", "--memory-cap", "0.5")
    (line,) = (one for one in out.splitlines() if str(path) in one)
    assert status == 0 and line.endswith("over the cap")
    status, _, err = run("compare", path, "--pp", "8", "--microbatches", "8")
    assert status == 2 and f"--pp 8 contradicts {path}" in err
    other = tmp_path / "other.json"
    run("schedule", *options("1f1b", 4, 8), "--output", other)
    status, _, err = run("compare", path, other)
    assert status == 2 and "have different costs; give --cost" in err
    assert run("compare", path, other, "--cost", "1,1,1", "--effort", "0.02")[0] == 0
    assert run("compare", "--pp", "4")[2].endswith("are required: --microbatches, or a file\n")


ONE_F_ONE_B = GENERATORS["1f1b"].orders


def _text(request):
    return [["F0.0"] * request.microbatches for _ in range(request.pp)]


def _early(request):
    rows = [list(row) for row in ONE_F_ONE_B(request)]
    rows[0].insert(0, rows[0].pop(rows[0].index(parse("BW0.0"))))
    return rows


def _fails(request):
    return request.nothing


@pytest.mark.parametrize("orders", [_text, _early, _fails])
def test_a_broken_generator_is_named_and_the_others_stay(run, monkeypatch, orders):
    monkeypatch.setitem(GENERATORS, "1f1b", replace(GENERATORS["1f1b"], orders=orders))
    status, out, err = run("compare", "--pp", "4", "--microbatches", "8", "--effort", "0.02")
    assert status == 1 and "generator of 1f1b" in err and err.count("\n") == 1
    assert "zb-h1 " in out and "v-half " in out and "generator of 1f1b" in out
    if orders is not _fails:
        status, _, err = run("simulate", *options("1f1b", 4, 8))
        assert status == 2 and "generator of 1f1b" in err


def test_small_messages(run, tmp_path):
    for line, words in (
        ("simulate --schedule 1f1b --pp 4 --microbatches 8 --cost -1,1,1", "-1"),
        (f"explore --export {tmp_path}/v.html --view %%%", "'%%%' is no view"),
    ):
        status, _, err = run(*line.split())
        assert status == 2 and words in err and "expected one argument" not in err


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("simulate --moe --moe-cost exchange=2,experts=3 --effort 0.5", "--effort 0.5"),
        ("simulate --moe --moe-cost exchange=2,experts=3 --p2p pair", "--p2p pair"),
        ("simulate --moe --moe-cost exchange=2,experts=3 --runs 5", "--runs 5"),
        ("simulate --moe --moe-cost exchange=2,experts=3 --slices 5", "--slices 5"),
        ("show --block v-half --pp 4 --effort 1", "--effort 1.0"),
        ("show --block v-half --pp 4 --vocabulary 1,1,1,1", "--vocabulary 1,1,1,1"),
        ("show --block v-half --pp 4 --json --theme dark", "--theme dark"),
        ("show --blocks --pp 4 --squeeze", "--squeeze"),
        ("show 1f1b --pp 4 --microbatches 4 --theme dark", "--theme dark"),
        ("show 1f1b --pp 4 --microbatches 4 --width 9 --output x.svg", "--width 9"),
        (
            "schedule --block v-half --pp 4 --microbatches 4 --vocabulary 1,1,1,1 --output x.json",
            "--vocabulary 1,1,1,1",
        ),
    ],
)
def test_an_option_of_another_mode_is_refused(run, line, option):
    status, out, err = run(*line.split())
    assert (status, out) == (2, "") and f": {option} is " in err
