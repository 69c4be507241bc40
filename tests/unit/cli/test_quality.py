"""The bound and the random pass times in ``simulate`` and ``compare``."""

from __future__ import annotations

import pytest

from megatron_ext.schedule import Link, forward_only, generate, offload_pass, simulate
from megatron_ext.schedule.jitter import jitter

from .conftest import answer, options

REAL = ["--cost", "1,0.98,0.74"]
OFFLOAD = ["--offload", "half", "--offload-time", 0.25]


@pytest.mark.parametrize(
    ("name", "more", "line"),
    [
        ("v-half", [], "26.5 (memory, 3 microbatches); reached: a longer search gains nothing"),
        ("v-min", [*REAL, "--microbatches", 9], "(memory, 2 microbatches); "),
        ("1f1b", [], "33 (way, B and W in one pass); reached: a longer search gains nothing"),
        ("zb-h2", ["--objective", "rank-span"], "24 of the span (work); reached: "),
        ("v-zb", OFFLOAD, "25.5 (work); reached: "),
        ("v-min", [*OFFLOAD, "--offload-transfer", "dual"], "25.5 (work); 15.7 % above: a longer"),
    ],
)
def test_bound_line(run, name, more, line):
    out = run("simulate", *options(name, 4, 8), *more)[1]
    (bound,) = [text for text in out.splitlines() if text.startswith("  bound ")]
    assert line in bound, bound


def test_bound_at_the_cap(run):
    """A cap that is not used up counts; a schedule over it counts with its own peak."""
    argv = ["--pp", 4, "--microbatches", 5, *REAL, "--memory-cap", 0.7]
    rows = {row["schedule"]: row for row in answer(run, "compare", *argv)["schedules"]}
    at_cap = answer(run, "simulate", "--schedule", "v-cap", *argv)
    for field in ("lower_bound", "bound_kind", "above_bound"):
        assert rows["v-cap"][field] == at_cap[field]
    own = answer(run, "simulate", *options("v-min", 4, 5), *REAL)
    assert rows["v-min"]["peak_activation_vs_1f1b"] == 0.5
    assert rows["v-min"]["lower_bound"] == at_cap["lower_bound"] < own["lower_bound"]
    over = answer(run, "simulate", *options("v-zb", 4, 5), *REAL)
    assert rows["v-zb"]["over_cap"] and rows["v-zb"]["lower_bound"] == over["lower_bound"]
    for row in rows.values():
        assert row["above_bound"] == pytest.approx(row["makespan"] / row["lower_bound"] - 1)
        assert row["above_bound"] >= 0


def test_forward_only_has_no_bound(run, file_of):
    path = file_of(forward_only(generate("1f1b", 2, 2).placement, 3))
    assert "lower_bound" not in answer(run, "simulate", "--schedule", path)
    assert "  bound " not in run("simulate", "--schedule", path)[1]


JITTER = ["--jitter", 0.1, "--runs", 8, "--seed", 3]


def test_jitter(run, file_of):
    data = answer(run, "simulate", *options("v-half", 4, 8), *REAL, *JITTER)
    got = data["makespan_quantiles"]
    fields = ["jitter", "runs", "seed", "mean", "median", "p95", "worst", "ratio"]
    assert list(got) == fields and (got["jitter"], got["runs"], got["seed"]) == (0.1, 8, 3)
    assert data["makespan"] < got["mean"] == pytest.approx(got["ratio"] * data["makespan"])
    out = run("simulate", *options("v-half", 4, 8), *REAL, *JITTER)[1]
    assert "; pass times +- 10 %, 8 runs, seed 3\n" in out
    for more in (["--p2p", "rank", "--queue", 1], OFFLOAD):
        other = answer(run, "simulate", *options("v-half", 4, 8), *REAL, *more, *JITTER)
        assert other["makespan"] < other["makespan_quantiles"]["mean"]
    offloaded = offload_pass(generate("v-half", 4, 8), Link.of(4, "0.25"), "half").schedule
    path = file_of(offloaded)
    exact = answer(run, "simulate", "--schedule", path, "--jitter", 0, "--runs", 1)
    assert exact["makespan_quantiles"]["worst"] == simulate(offloaded).makespan
    again = answer(run, "simulate", "--schedule", path, *JITTER)["makespan_quantiles"]
    assert again["mean"] == float(jitter(offloaded, 0.1, 8, 3).mean)


def test_compare_with_jitter(run):
    argv = ["--pp", 2, "--microbatches", 4]
    for row in answer(run, "compare", *argv, *JITTER)["schedules"]:
        alone = answer(run, "simulate", "--schedule", row["schedule"], *argv, *JITTER)
        assert row["makespan_quantiles"] == alone["makespan_quantiles"]
    out = run("compare", *argv, *JITTER)[1].splitlines()
    assert out[0].endswith("; pass times +- 10 %, 8 runs, seed 3")
    assert "  makespan  above bound  with jitter  peak  of 1F1B's" in out[2]
    assert "with jitter: the mean makespan under random pass times" in out


@pytest.mark.usefixtures("some_effort")
def test_jitter_chooses_among_the_fastest(run, tmp_path):
    """Interleaved-zb and v-zb take 18, but v-zb less where pass times vary."""
    argv = ["--pp", 3, "--microbatches", 6, "--schedule", "auto"]
    first, chosen = (answer(run, "simulate", *argv, *more) for more in ([], JITTER))
    assert (first["schedule"], chosen["schedule"]) == ("interleaved-zb", "v-zb")
    assert first["makespan"] == chosen["makespan"]
    for name, times in (("interleaved-zb", None), ("v-zb", chosen["makespan_quantiles"])):
        own = answer(run, "simulate", *options(name, 3, 6), *JITTER)["makespan_quantiles"]
        assert own["mean"] > chosen["makespan_quantiles"]["mean"] if times is None else own == times
    said = run("simulate", *argv, *JITTER)[1]
    assert "next is interleaved-zb, as fast, but less robust" in said
    written = answer(run, "schedule", *argv, *JITTER, "--output", tmp_path / "one.json")
    assert written["schedule"] == "v-zb"
    assert written["makespan"] == chosen["makespan"]
    assert written["steadier"]["before"] == chosen["makespan_quantiles"]["mean"]
    rows = answer(run, "compare", *argv[:4], *JITTER)["schedules"]
    names = [row["schedule"] for row in rows]
    assert names.index("v-zb") < names.index("interleaved-zb")


def test_schedule_with_jitter_writes_a_steadier_order(run, tmp_path):
    argv, path = options("v-half", 4, 8), tmp_path / "one.json"
    written = answer(run, "schedule", *argv, *REAL, *JITTER, "--output", path)
    named = answer(run, "simulate", *argv, *REAL, *JITTER)
    of_file = answer(run, "simulate", "--schedule", path, *JITTER)
    assert written["makespan"] == named["makespan"] == of_file["makespan"]
    assert written["steadier"]["before"] == named["makespan_quantiles"]["mean"]
    assert written["steadier"]["after"] == of_file["makespan_quantiles"]["mean"]
    assert written["steadier"]["after"] < written["steadier"]["before"]
    said = run("schedule", *argv, *REAL, *JITTER, "--output", path)[1]
    assert "  jitter: mean " in said and " before; mean " in said
    said = run("schedule", *options("1f1b", 4, 8), *REAL, *JITTER, "--output", path)[1]
    assert "  jitter: no steadier order found; mean " in said
    span = ["--objective", "rank-span", "--output", path]
    assert "steadier" not in answer(run, "schedule", *argv, *REAL, *JITTER, *span)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--jitter", "x"], "--jitter: must be a number from 0 to 2, such as 0.1, got 'x'"),
        (["--jitter", "2.5"], "--jitter: must be a number from 0 to 2, such as 0.1, got '2.5'"),
        (["--jitter", "0.1", "--runs", "0"], "--runs: must be a whole number >= 1"),
        (["--runs", "5"], "--runs 5 is for --jitter; give both"),
        (["--seed", "0"], "--seed 0 is for --jitter; give both"),
    ],
)
def test_bad_jitter(run, argv, error):
    status, out, err = run("simulate", *options("1f1b", 2, 2), *argv)
    assert (status, out) == (2, "") and error in err
