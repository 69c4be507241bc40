"""``compare``: every schedule side by side."""

from __future__ import annotations

import json

import pytest

from megatron_ext.schedule.generators import NAMES
from tests.support.grids import KINDS, sampled

from .conftest import FIELDS, answer


def test_compare_json_is_the_contract(run):
    argv = ["--pp", 2, "--microbatches", 3, "--cost", "1,1.1,0.8", "--hop", 0.1]
    data = answer(run, "compare", *argv)
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


def test_a_name_is_no_file(run):
    status, _, err = run("compare", "zb-h1", "--pp", 2, "--microbatches", 3)
    assert status == 2 and "zb-h1 is a schedule's name" in err


def test_compare_marks_what_exceeds_the_cap(run):
    data = answer(run, "compare", "--pp", 4, "--microbatches", 8, "--memory-cap", 0.75)
    assert data["memory_cap"] == 0.75
    for row in data["schedules"]:
        assert row["over_cap"] is (row["peak_activation_vs_1f1b"] > 0.75)
    assert {row["over_cap"] for row in data["schedules"]} == {True, False}
    out = run("compare", "--pp", 4, "--microbatches", 8, "--memory-cap", 0.75)[1]
    marked = {line.split()[0] for line in out.splitlines() if line.endswith("  over the cap")}
    assert marked == {row["schedule"] for row in data["schedules"] if row["over_cap"]}
    over = [row["over_cap"] for row in data["schedules"]]
    assert over == sorted(over), "what fits comes first"
    best = [line for line in out.splitlines() if line.endswith("  best")]
    assert [line.split()[0] for line in best] == [data["schedules"][0]["schedule"]]


def test_compare_lists_the_impossible_with_the_reason(run, tmp_path):
    path = tmp_path / "stages.json"
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 4}))
    argv = ["--pp", 2, "--microbatches", 4, "--stage-cost", path]
    assert answer(run, "compare", *argv)["impossible"] == [], "one stage of 1f1b is two of the V's"
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 2}))
    reasons = {
        row["schedule"]: row["reason"] for row in answer(run, "compare", *argv)["impossible"]
    }
    assert "for 2 stages but pp=2 x chunks=2 has 4" in reasons["v-half"]
    out = run("compare", *argv)[1]
    assert "not possible here:\n  interleaved: costs are given for 2 stages" in out
    path.write_text(json.dumps({"stages": [[1, 1, 1]] * 3}))
    status, _, err = run("compare", *argv)
    assert status == 2
    assert "no schedule is possible here; 1f1b, for one: costs are given for 3 stages" in err


def test_compare_chunks_are_for_what_takes_any(run):
    rows = answer(run, "compare", "--pp", 2, "--microbatches", 4, "--chunks", 3)["schedules"]
    chunks = {row["schedule"]: row["chunks"] for row in rows}
    assert (chunks["1f1b"], chunks["v-half"], chunks["interleaved"], chunks["po"]) == (1, 2, 3, 3)


def test_compare_group_size(run):
    argv = ["--pp", 3, "--microbatches", 6, "--cost", "1,0.9,0.6", "--hop", 0.1]
    data = answer(run, "compare", *argv, "--group-size", 2)
    head = ["pp", "microbatches", "cost", "group_size", "schedules", "impossible"]
    assert list(data) == head and data["group_size"] == 2
    rows = {row["schedule"]: row for row in data["schedules"]}
    for name, more in (("gis", ["--group-size", 2]), ("zb-h2", []), ("v-half", [])):
        expected = json.loads(run("simulate", "--json", "--schedule", name, *argv, *more)[1])
        assert rows[name] | {"generation_seconds": 0} == expected | {"generation_seconds": 0}
    out = run("compare", *argv, "--group-size", 2)[1]
    assert "hop 0.1; gis in groups of 2\n" in out


def test_compare_table(run):
    out = run("compare", "--pp", 4, "--microbatches", 8)[1].splitlines()
    assert out[0] == "pp 4, microbatches 8; costs F 1, B 1, W 1, hop 0"
    head = "schedule chunks bubble makespan above bound peak of 1F1B's"
    assert out[2].split() == head.split()
    row = next(line for line in out if line.startswith("1f1b")).split()
    assert row == ["1f1b", "1", "27.27", "%", "33", "0.00", "%", "4", "100.0", "%"]


def test_compare_says_what_peaks_are_a_share_of(run):
    """With fewer microbatches than ranks 1F1B itself has less than that."""
    out = run("compare", "--pp", 4, "--microbatches", 3)[1].splitlines()
    row = next(line for line in out if line.startswith("1f1b")).split()
    assert row[-3:] == ["3", "75.0", "%"]
    said = next(line for line in out if line.startswith("peak: "))
    assert "of the number of ranks, which is 1F1B's peak where" in said


OFFLOAD = ["--offload", "auto", "--offload-time", 0.25]


def test_compare_with_offload_is_simulate_with_offload(run):
    argv = ["--pp", 4, "--microbatches", 8, "--offload", "half", "--offload-time", "0.2,0.3"]
    data = answer(run, "compare", *argv)
    head = ["offload", "offload_time", "schedules", "impossible"]
    assert list(data)[3:] == head
    assert [data[field] for field in head[:2]] == ["half", "0.2,0.3"]
    assert {row["schedule"] for row in data["schedules"]} == set(NAMES)
    for row in (row for row in data["schedules"] if row["schedule"] in KINDS):
        alone = ["simulate", "--json", "--schedule", row["schedule"]]
        expected = json.loads(run(*alone, *argv)[1])
        without = json.loads(run(*alone, *argv[:4])[1])["peak_activation"]
        assert row.pop("peak_activation_without_offload") == max(without)
        assert row["offloaded_sets"] > 0
        assert row | {"generation_seconds": 0} == expected | {"generation_seconds": 0}
    off = answer(run, "compare", *argv[:4], "--offload", "off")
    plain = answer(run, "compare", *argv[:4])
    for table in (off, plain):
        for row in table["schedules"]:
            del row["generation_seconds"]
    assert off == plain


CAPS = [(4, "1/2", "1/8"), (6, "1/3", "1/12")]  # 2 and 1/2 microbatches of activations


@pytest.mark.parametrize(("pp", "cap", "too_little"), sampled(CAPS, CAPS[:1]))
def test_compare_with_offload_caps_what_stays_on_the_device(run, pp, cap, too_little):
    argv = ["--pp", pp, "--microbatches", 2 * pp, "--memory-cap", cap]
    rows = {r["schedule"]: r for r in answer(run, "compare", *argv, *OFFLOAD)["schedules"]}
    for row in rows.values():
        assert row["over_cap"] is (max(row["peak_activation"]) > 2)
    assert {row["over_cap"] for row in rows.values()} == {True, False}
    assert rows["v-cap"]["over_cap"] is False
    assert rows["v-cap"]["peak_activation_without_offload"] > 2
    auto = ["simulate", "--json", "--schedule", "auto", *argv, *OFFLOAD]
    fastest = next(row for row in rows.values() if not row["over_cap"])
    assert json.loads(run(*auto)[1])["makespan"] <= fastest["makespan"]
    few = ["--pp", pp, "--microbatches", pp]
    hopeless = answer(run, "compare", *few, "--memory-cap", too_little, *OFFLOAD)
    assert {row["schedule"] for row in hopeless["impossible"]} == {"1f1b", "zb-h1", "zb-h2"}
    assert all(row["over_cap"] for row in hopeless["schedules"]), "rows all the same"


def test_compare_table_with_offload(run):
    argv = ["compare", "--pp", 4, "--microbatches", 8, *OFFLOAD]
    out = run(*argv, "--memory-cap", 0.5)[1].splitlines()
    assert out[0].endswith("memory cap 50 % of 1F1B's peak; offload auto, 0.25 of F+B+W a way")
    assert out[2].endswith("of 1F1B's  without  host peak  offloaded  stall")
    row = next(line for line in out if line.startswith("1f1b")).split()
    assert row[4:] == ["33", "0.00", "%", "2", "50.0", "%", "4", "4", "14", "0"]
    assert any(line.startswith("v-zb") and line.endswith("  over the cap") for line in out)
    out = run(*argv[:5], "--offload", 2, "--offload-time", 1)[1]
    assert "  1f1b: cannot offload 2 chunks of a rank that has 1; give 0 to 1" in out
