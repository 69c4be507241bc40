"""The bound in ``simulate`` and ``compare``."""

from __future__ import annotations

import pytest

from megatron_ext.schedule import forward_only, generate

from .conftest import answer, options

REAL = ["--cost", "1,0.98,0.74"]
OFFLOAD = ["--offload", "half", "--offload-time", 0.25]


@pytest.mark.parametrize(
    ("name", "more", "line"),
    [
        ("v-half", [], "26.5 (memory, 3 microbatches); reached: a longer search gains nothing"),
        ("v-min", [*REAL, "--microbatches", 9], "(memory, 2 microbatches); "),
        ("1f1b", [], "33 (way, B and W in one pass); reached: a longer search gains nothing"),
        ("v-zb", OFFLOAD, "25.5 (work); reached: "),
        ("v-min", OFFLOAD, "25.5 (work); 15.7 % above: a longer"),
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
