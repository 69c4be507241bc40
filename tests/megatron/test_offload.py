"""Offloading in training: gradients bit for bit stock's, memory as planned on every rank."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import check, generate, offload_pass
from megatron_ext.schedule.link import Link
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly
from tests.support.grids import sampled

# Sets of these differ in size from microbatch to microbatch.
VARYING = ("v-half/lengths", "v-half/moe")


results = case_results("megatron.cases.offload_cases", first=True)


# All schedules of the mission are among them.
OURS = [
    *(
        "1f1b/",
        "interleaved/interleaved",
        "zb-h1/",
        "interleaved-zb/",
        "v-min/",
        "v-half/",
        "v-zb/",
    ),
    *("v-cap/", "gis/", "gis-h/", "po/", "v-half/m3", "1f1b/fusion", "v-zb/fusion"),
    *("zb-h1/overlap-bf16", "v-half/overlap-bf16", "v-half/tied", "v-half/lengths"),
    *("interleaved-zb/recompute", "v-half/moe", "v-half/measured", "file/", "v-cap/profiled"),
]
# With a policy and without. What is recomputed keeps nothing that a policy could.
KEPT = {"v-half/keep": "v-half/", "1f1b/keep": "1f1b/"}
OURS += [*KEPT, "interleaved-zb/keep-recompute"]
# At night: schedules with the placement and the passes of another one; features once more.
NIGHTLY = ("interleaved/interleaved", "v-min/", "gis/", "1f1b/fusion", "zb-h1/overlap-bf16")
NIGHTLY += ("zb-h1/", "v-zb/", "v-cap/", "gis-h/", "interleaved-zb/", "1f1b/keep")
# These features without offload are in test_numerics, recomputation is in another case.
NIGHTLY += ("v-half/m3", "v-half/tied", "interleaved-zb/recompute")
NIGHTLY += ("v-half/lengths", "v-half/overlap-bf16", "po/", "v-zb/fusion")
NIGHTLY += ("interleaved-zb/keep-recompute",)
SAMPLED = sampled(OURS, [name for name in OURS if name not in NIGHTLY])
# Where a case's model is not the second part of its name.
STOCK = {"measured": "", "profiled": "", "keep": "", "keep-recompute": "recompute"}


def test_every_case_is_compared(results: Cases) -> None:
    assert {n for n in results if not n.startswith("stock")} == {*OURS, "v-zb/profiled"}


def steps(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Training steps of every pipeline rank that left a trace."""
    lines = [[json.loads(x) for x in text.splitlines()] for text in result["traces"].values()]
    found = [[line for line in rank if not line["forward_only"]] for rank in lines]
    assert len(found) == 4 and all(len(rank) == 3 for rank in found)
    return found


@pytest.mark.parametrize("name", [*SAMPLED, nightly("v-zb/profiled")])
def test_losses_and_gradients_are_bitwise_stocks(results: Cases, name: str) -> None:
    """With random delays of every copy, and NaN in memory that was let go."""
    model = name.split("/")[1]
    stock = results["stock/" + STOCK.get(model, model)]
    assert results[name]["losses"] == stock["losses"]
    assert len(stock["gradients"]) >= 101
    mine = results[name]["gradients"]
    assert [n for n, g in stock["gradients"].items() if mine[n] != g] == []


@pytest.mark.parametrize("name", SAMPLED)
def test_memory_is_as_planned_on_every_rank(results: Cases, name: str) -> None:
    for rank in steps(results[name]):
        for line in rank:
            found = line["offload"]
            assert line["peak_sets"] == line["peak_sets_planned"]
            assert found["peak_host_sets"] <= found["planned_host_sets"]
            bytes_ = found["peak_device_bytes"], found["planned_device_bytes"]
            assert bytes_[0] <= bytes_[1] if name in VARYING else bytes_[0] == bytes_[1]


@pytest.mark.parametrize("name", SAMPLED)
def test_sets_do_leave_and_come_back(results: Cases, name: str) -> None:
    last = [rank[-1]["offload"] for rank in steps(results[name])]
    assert sum(o["offloads"] for o in last) > 0, name
    assert all(o["offloads"] == o["reloads"] for o in last)
    assert all(o["refused"] == 0 for o in last)


@pytest.mark.parametrize("name", SAMPLED)
def test_host_memory_is_constant_after_the_first_step(results: Cases, name: str) -> None:
    for rank in steps(results[name]):
        _, *later = (line["offload"]["arena_bytes"] for line in rank)
        # The plan of the second step is another one where times are measured, and that of the
        # third one after a profile of two.
        assert len(set(later)) == 1 or name == "v-cap/profiled"
        assert (max(later) > 0) == (rank[-1]["offload"]["offloads"] > 0)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("1f1b", "full"),
        nightly("interleaved-zb", "full"),
        nightly("v-min", "half"),
        ("v-half", "full"),
        nightly("v-zb", "full"),
        nightly("gis-h", "full"),
        nightly("po", "half"),
    ],
)
def test_resident_sets_are_the_plans(results: Cases, name: str, wanted: str) -> None:
    """The plan made here, not the one that the ranks report."""
    link = Link.of(4, Fraction(1, 4))
    report = check(offload_pass(generate(name, 4, 8), link, wanted).schedule)
    for rank in steps(results[f"{name}/"]):
        at = rank[0]["pipeline_rank"]
        assert [line["peak_sets"] for line in rank] == [report.peak_sets[at]] * 3
        assert rank[-1]["offload"]["offloads"] == 3 * report.offloaded_sets[at]


@pytest.mark.parametrize("name", sampled(KEPT, ["v-half/keep"]))
def test_a_policy_moves_bytes_from_the_host_to_the_device(results: Cases, name: str) -> None:
    """As planned, see above; the same sets are offloaded, each with fewer bytes."""
    last = [[rank[-1]["offload"] for rank in steps(results[n])] for n in (name, KEPT[name])]
    for kept, every in zip(*last):
        assert kept["kept_bytes"]["policy"] > 0 and "policy" not in every["kept_bytes"]
        assert kept["offloads"] == every["offloads"]
        if not every["offloads"]:
            continue  # the last rank of 1f1b
        assert kept["bytes_to_host"] < every["bytes_to_host"]
        assert kept["arena_bytes"] < every["arena_bytes"]
        # Equal where the peak is before the first RELEASE.
        assert kept["planned_device_bytes"] >= every["planned_device_bytes"]
        assert kept["held_elsewhere_bytes"] <= every["held_elsewhere_bytes"]
    kept_bytes, every_bytes = (sum(o["planned_device_bytes"] for o in ranks) for ranks in last)
    assert kept_bytes > every_bytes


@pytest.mark.parametrize(
    ("name", "most"),
    [("v-half/", 5), ("file/", 4), nightly("po/", 3), nightly("gis-h/", 3)],
)
def test_offload_lowers_the_peak(results: Cases, name: str, most: int) -> None:
    """v-half keeps 6 sets on a rank, po 5; copies under way count, in pairs one more."""
    assert max(rank[-1]["peak_sets"] for rank in steps(results[name])) <= most


def test_measured_times_make_the_second_plan(results: Cases) -> None:
    """The first step assumes a quarter; copies of so small sets take less."""
    for rank in steps(results["v-half/measured"]):
        plans = [line["plan"] for line in rank]
        assert plans[0] != plans[1] == plans[2]


@pytest.mark.parametrize("name", [nightly("v-zb/profiled"), "v-cap/profiled"])
def test_a_profile_makes_another_order(results: Cases, name: str) -> None:
    """Two steps are measured, the third one runs what is better for a heavy last stage."""
    every = steps(results[name])
    orders = [[[e["action"] for e in line["events"]] for line in rank] for rank in every]
    assert all(first == second for first, second, _ in orders)
    assert any(second != third for _, second, third in orders)
