"""``--slices`` and ``--microbatch-cost`` through the commands that make or read a schedule."""

from __future__ import annotations

import json

import pytest

from .conftest import FIELDS, options

SLICED = [*options("v-zb", 4, 4), "--slices", "4"]


def test_simulate(run):
    status, out, err = run("simulate", *SLICED, "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    bounds = {"lower_bound", "bound_kind", "above_bound"}
    expected = [field for field in FIELDS if field not in bounds]
    expected.insert(expected.index("microbatches") + 1, "slices")
    assert list(data) == expected
    assert data["slices"] == 4 and data["bubble"] < 0.06
    assert max(data["peak_activation"]) == 7 / 4
    assert "microbatches 4, slices 4;" in run("simulate", *SLICED)[1]


def test_what_a_slice_costs(run):
    def makespan(*more):
        return json.loads(run("simulate", *SLICED, *more, "--json")[1])["makespan"]

    # Every slice of four but the first adds a fifth of a W.
    assert makespan("--slice-overhead", "0.2") > makespan() + 4 * 3 * 0.2 - 0.5


def test_a_file_keeps_them(run, tmp_path):
    path = str(tmp_path / "sliced.json")
    argv = [*options("v-half", 4, 3), "--slices", "1,2,4", "--microbatch-cost", "1,2,3"]
    assert run("schedule", *argv, "--output", path)[0] == 0
    data = json.loads((tmp_path / "sliced.json").read_text())
    assert data["slices"] == [1, 2, 4] and "F0.1/1" in data["ranks"][0]
    status, out, _ = run("simulate", "--schedule", path)
    assert status == 0 and "microbatches 3, slices 1 to 4, costs of each" in out
    own = json.loads(run("simulate", "--schedule", path, "--json")[1])
    assert own["slices"] == [1, 2, 4]
    equal = ["simulate", "--schedule", path, "--microbatch-cost", "1,1,1", "--json"]
    assert json.loads(run(*equal)[1])["makespan"] < own["makespan"]
    assert run("simulate", "--schedule", str(tmp_path / "sliced.json"))[0] == 0
    data["ranks"][3] = data["ranks"][3][::-1]
    (tmp_path / "sliced.json").write_text(json.dumps(data))
    assert run("simulate", "--schedule", path)[0] == 1


def test_a_file_of_factors(run, tmp_path):
    """A line a microbatch, one factor or three."""
    path = tmp_path / "lengths.txt"
    path.write_text("1\n2\n0.5,0.25,0.5\n")
    argv = ["simulate", *options("1f1b", 2, 3), "--json", "--microbatch-cost"]
    whole = json.loads(run(*argv, str(path))[1])
    assert "slices" not in whole
    assert whole["makespan"] * 2 * (1 - whole["bubble"]) == pytest.approx(2 * (3 + 6 + 1.25))


def test_a_free_order_of_microbatches(run, tmp_path):
    """Every microbatch keeps its costs and its slices; the file and all outputs say the order."""
    weights, slices = [1, 3, 2, 1, 0.5, 2], [1, 3, 2, 1, 1, 2]
    asked = [*options("zb-h1", 2, 6), "--microbatch-cost", ",".join(map(str, weights))]
    cut = [*asked, "--slices", ",".join(map(str, slices))]
    for argv in (asked, cut):
        given = json.loads(run("simulate", *argv, "--json")[1])
        path = str(tmp_path / "free.json")
        assert run("schedule", *argv, "--reorder-microbatches", "--output", path)[0] == 0
        found = json.loads(run("simulate", "--schedule", path, "--json")[1])
        order, saved = found["microbatch_order"], found["saved_by_order"]
        assert sorted(order) == list(range(6)) != order and "microbatch_order" not in given
        assert found["makespan"] / given["makespan"] == pytest.approx(1 - saved) and saved > 0.01
        assert found["slices" if argv is cut else "microbatches"] == (
            [slices[j] for j in order] if argv is cut else 6
        )
        units = json.loads((tmp_path / "free.json").read_text())["cost"]["units"]
        counts = slices if argv is cut else [1] * 6
        assert [row[0] for row in units] == pytest.approx(
            [weights[j] / counts[j] for j in order for _ in range(counts[j])]
        )
        assert run("simulate", "--schedule", path)[0] == 0
    text = run("simulate", *asked, "--reorder-microbatches")[1]
    assert "microbatches     in the order 4 " in text and "% less time than as given" in text
    short = [*options("1f1b", 2, 2), "--microbatch-cost", "1,1", "--reorder-microbatches"]
    assert "microbatches     as given; no other" in run("simulate", *short)[1]
    sizes = [*asked[2:], "--reorder-microbatches"]
    status, out, _ = run("compare", *sizes)
    assert status == 0 and "by order" in out and "  best, microbatches in the order" in out
    assert "microbatches in the order" in run("show", "zb-h1", *sizes)[1]


def test_compare_and_show(run):
    sizes = ["--pp", "4", "--microbatches", "2", "--slices", "3"]
    status, out, _ = run("compare", *sizes)
    assert status == 0 and "schedule        chunks  slices" in out
    assert "dualpipev runs passes in pairs" in out
    data = json.loads(run("compare", *sizes[:-1], "1,3", "--json")[1])
    assert data["slices"] == [1, 3]
    rows = {(row["schedule"], row.get("slices", 1)): row for row in data["schedules"]}
    assert len(rows) == 12 + 13
    assert rows["v-zb", 3]["makespan"] < rows["v-zb", 1]["makespan"]
    out = run("show", "v-zb", *sizes)[1]
    assert "slices 3, makespan" in out and "F1/2" in out


@pytest.mark.parametrize("suffix", ["svg", "json", "html"])
def test_pictures_name_slices(run, tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    argv = ["show", "v-half", "--pp", "2", "--microbatches", "2", "--slices", "3"]
    assert run(*argv, "--output", str(path))[0] == 0
    text = path.read_text()
    assert "1/2" in text
    assert {"svg": "K = 3", "json": '"slices": 3', "html": "K = 3"}[suffix] in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--slices", "4,3"], "slices are given for 2 microbatches, but there are 4"),
        (["--slices", "0"], "a microbatch has 1 slice or more, got 0"),
        (["--slices", "x"], "--slices must be one whole number or one a microbatch"),
        (["--slices", "100000"], "are more than 65536"),
        (["--attention-share", "0.5"], "--attention-share 1/2 is for --slices; give both"),
        (["--slices", "2", "--attention-share", "2"], "must be a number from 0 to 1"),
        (["--microbatch-cost", "1,2"], "has 2 microbatches, but there are 4; give one factor"),
        (["--microbatch-cost", "1,2,0,1"], "microbatch 2 must be one factor > 0"),
        (["--microbatch-cost", "nowhere"], "--microbatch-cost nowhere: No such file"),
        (["--slices", "2", "--exchange", ".1,.1"], "communication of experts in the costs takes"),
    ],
)
def test_refused(run, argv, words):
    status, out, err = run("simulate", *options("v-zb", 4, 4), *argv)
    assert (status, out) == (2, "")
    assert words in err and len(err.strip().splitlines()[-1]) < 300


def test_a_file_of_lengths(run, tmp_path):
    """Of the mean length 2: one and a half and half of it, and attention by the square."""
    path = tmp_path / "lengths.txt"
    path.write_text("tokens\n3\n1\n")
    words = ["simulate", *options("1f1b", 2, 2), "--json", "--microbatch-cost"]
    lengths = json.loads(run(*words, path)[1])
    assert lengths["makespan"] == json.loads(run(*words, "1.5,0.5")[1])["makespan"]
    attended = json.loads(run(*words, path, "--attention-share", "0.5")[1])
    factors = tmp_path / "factors.txt"
    factors.write_text("1.875,2,1.5\n.375,1/3,.5\n")
    assert attended["makespan"] == json.loads(run(*words, factors)[1])["makespan"]
    path.write_text("tokens\n")
    assert "no lengths" in run(*words, path)[2]
