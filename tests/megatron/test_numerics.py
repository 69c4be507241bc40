"""Losses and gradients of a GPT under our schedules: bit for bit those of stock 1F1B."""

from __future__ import annotations

import json

import pytest

from megatron_ext.schedule import generate, load, simulate
from tests.support import ORDER_FILE
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly
from tests.support.grids import sampled

# Our case -> the stock case it must equal.
EQUAL = {
    "1f1b": "stock",
    "zb-h1": "stock",
    "v-half": "stock",
    "v-zb": "stock",
    "zb-h2": "stock",
    "interleaved-zb": "stock",
    "gis-h": "stock",
    "po": "stock",
    "v-min": "stock",
    "dualpipev": "stock",
    "v-cap": "stock",
    "gis": "stock",
    "auto": "stock",
    "file": "stock",
    "interleaved": "stock-interleaved",
    "v-half-m3": "stock-m3",
    "auto-m3": "stock-m3",
    "interleaved-m3": "stock-m3",
    "v-half-forward": "stock-forward",
    "file-forward-m3": "stock-forward-m3",
    "zb-h1-overlap-bf16": "stock-overlap-bf16",
    "v-zb-overlap-bf16": "stock-overlap-bf16",
    "v-half-recompute": "stock-recompute",
    "zb-h1-lengths": "stock-lengths",
    "v-half-lengths": "stock-lengths",
    "v-half-tokens": "stock-tokens",
    "zb-h1-enabled": "stock",
    "interleaved-zb-enabled": "stock",
    "v-half-tied-enabled": "stock-tied",
    "v-zb-overlap-bf16-enabled": "stock-overlap-bf16",
    "zb-h1-dropped-in": "stock",
    "zb-h1-slices-dropped-in": "1f1b-slices",
    # Two copies of one weight add their gradients; with two summands no order differs.
    "v-half-tied": "stock-tied",
}

# At night: a second schedule, or a second door, for what another case has already.
NIGHTLY = (
    *("auto-m3", "interleaved-m3", "zb-h1-overlap-bf16"),
    *("zb-h1-lengths", "v-zb-overlap-bf16-enabled"),
    *("zb-h1-enabled", "file-forward-m3", "gis", "zb-h1-slices-dropped-in"),
    *("v-zb", "v-min", "v-cap", "zb-h2", "gis-h", "interleaved", "interleaved-zb-enabled"),
    *("v-half-lengths", "v-half-tied-enabled", "v-half-recompute"),
)
SAMPLED = sampled(EQUAL, [case for case in EQUAL if case not in NIGHTLY])
BACKWARD = [case for case in EQUAL if "forward" not in case]


results = case_results("megatron.cases.gpt_cases")


@pytest.mark.parametrize("case", SAMPLED)
def test_losses_are_bitwise_stocks(results: Cases, case: str) -> None:
    stock = results[EQUAL[case]]["losses"]
    assert results[case]["losses"] == stock
    m = 3 if case.endswith("m3") else 8
    assert len(stock) == results[case]["data_parallel"]
    assert all(len(losses) == 4 * m for losses in stock)  # fp32, one a microbatch


@pytest.mark.parametrize("case", sampled(BACKWARD, [c for c in BACKWARD if c not in NIGHTLY]))
def test_gradients_are_bitwise_stocks(results: Cases, case: str) -> None:
    stock, ours = results[EQUAL[case]]["gradients"], results[case]["gradients"]
    assert set(ours) == set(stock)
    assert len(stock) == 101
    assert [name for name in stock if ours[name] != stock[name]] == []


def test_tied_embeddings_need_no_communication_under_v(results: Cases) -> None:
    """The group that stock reduces tied gradients over has one rank: nothing is sent."""
    assert results["stock-tied"]["embedding_ranks"] == [[0, 3], None, None, [0, 3]]
    assert results["v-half-tied"]["embedding_ranks"] == [[0], None, None, None]
    assert results["v-half-tied"]["gradients"] == results["stock-tied"]["gradients"]


def test_the_comparison_can_fail(results: Cases) -> None:
    """Gradients are there, and depend on the data."""
    few, many = results["stock-m3"]["gradients"], results["stock"]["gradients"]
    assert all(any(gradient) for gradient in many.values())
    assert all(few[name] != many[name] for name in many)


@pytest.mark.parametrize(
    ("case", "name", "pp", "m"),
    [
        ("1f1b", "1f1b", 4, 8),
        nightly("interleaved", "interleaved", 4, 8),
        ("zb-h1", "zb-h1", 4, 8),
        ("v-half", "v-half", 4, 8),
        nightly("v-zb", "v-zb", 4, 8),
        nightly("zb-h2", "zb-h2", 4, 8),
        ("interleaved-zb", "interleaved-zb", 4, 8),
        nightly("gis-h", "gis-h", 4, 8),
        ("po", "po", 4, 8),
        nightly("v-min", "v-min", 4, 8),
        ("dualpipev", "dualpipev", 4, 8),
        nightly("v-cap", "v-cap", 4, 8),
        nightly("gis", "gis", 4, 8),
        ("auto", "v-half", 4, 8),
        nightly("auto-m3", "v-half", 4, 3),
        ("file", ORDER_FILE, 4, 8),
        ("v-half-m3", "v-half", 4, 3),
        ("v-zb-overlap-bf16", "v-zb", 2, 8),
    ],
)
def test_resident_sets_are_the_simulated(
    results: Cases, case: str, name: str, pp: int, m: int
) -> None:
    cap = {"memory_cap": 7} if name == "v-cap" else {}
    made = load(name) if name == ORDER_FILE else generate(name, pp, m, **cap)
    planned = simulate(made).peak_sets
    traces = results[case]["traces"]
    assert len(traces) == 4
    for text in traces.values():
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == 2  # two iterations
        for line in lines:
            assert line["peak_sets"] == planned[line["pipeline_rank"]]


def test_trace_holds_every_action_in_order(results: Cases) -> None:
    ranks = generate("v-half", 4, 8).ranks
    for text in results["v-half"]["traces"].values():
        line = json.loads(text.splitlines()[-1])
        events = line["events"]
        assert [e["action"] for e in events] == [str(a) for a in ranks[line["pipeline_rank"]]]
        times = [t for e in events for t in (e["start_us"], e["end_us"])]
        assert times == sorted(times)


def test_every_case_of_ours_is_compared(results: Cases) -> None:
    """What others are compared with is stock's, or in slices 1F1B's."""
    ours = {case for case in results if not case.startswith("stock")}
    assert ours - {"1f1b-slices"} == set(EQUAL)
    assert set(EQUAL.values()) - ours == {case for case in EQUAL.values() if "stock" in case}
