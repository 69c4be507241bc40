"""Steps that are planned for the lengths of their microbatches: exact results, as given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly
from tests.support.step_lengths import STEPS

results = case_results("megatron.cases.length_cases", "installed")


def merged(ranks: Sequence[dict[str, Any]], what: str) -> dict[str, bytes]:
    """One dictionary of those of all ranks."""
    return {key: value for rank in ranks for key, value in rank[what].items()}


@pytest.mark.parametrize("case", ["zb-h1", "v-half"])
def test_in_the_given_order_it_is_stock(results: Cases, case: str) -> None:
    """Bit for bit; every step but that of equal lengths has an order for its own."""
    ours, stock = results[case], results["stock"]
    for what in ("returned", "gradients"):
        found = merged(ours, what)
        assert found == merged(stock, what) and all(map(any, found.values()))
    steps = ours[0]["steps"]
    assert [step["tokens"] for step in steps] == [*STEPS]
    assert [step["order"] for step in steps] == [tuple(range(len(step))) for step in STEPS]
    assert [step["own"] for step in steps] == [True] * 4 + [False]


def test_equal_lengths_have_the_plan_of_equal_costs(results: Cases) -> None:
    planned, plain = (results[case][0]["steps"] for case in ("v-half", "v-half-equal"))
    assert planned[-1]["plan"] == plain[-1]["plan"]
    assert planned[0]["plan"] != plain[0]["plan"] and plain[0]["units"] is None


@pytest.mark.parametrize("case", ["zb-h1-free", "v-half-free"])
def test_in_another_order_it_is_stock_with_the_data_in_that_order(
    results: Cases, case: str
) -> None:
    """Gradients bit for bit; losses are those of their microbatches, in the order given."""
    ours, stock = results[case], results["stock"]
    assert merged(ours, "returned") == merged(stock, "returned")
    again = {key: value for rank in ours for key, value in rank["stock"]["gradients"].items()}
    assert merged(ours, "gradients") == again and len(again) > 20
    orders = [step["order"] for step in ours[0]["steps"]]
    assert [rank["steps"][0]["order"] for rank in ours] == [orders[0]] * 2
    assert any(list(order) != sorted(order) for order in orders)
    assert [sorted(order) for order in orders] == [[*range(len(step))] for step in STEPS]


def test_one_plan_serves_all_orders_of_the_same_lengths(results: Cases) -> None:
    """The same microbatches come again: each runs in the place that its length had."""
    second, third = results["v-half-free"][0]["steps"][1:3]
    assert second["plan"] == third["plan"] and second["units"] == third["units"]
    places = [[step["tokens"][number] for number in step["order"]] for step in (second, third)]
    assert places[0] == places[1] and second["order"] != third["order"]


@pytest.mark.parametrize("case", ["zb-h1", "v-half", "v-half-free"])
def test_sets_count_by_their_tokens(results: Cases, case: str) -> None:
    """The plan's peak, in microbatches of the longest, is the one that ran."""
    for rank in results[case]:
        for step in rank["steps"]:
            assert step["peak"] == pytest.approx(step["planned"])
    first, *_, last = results[case][0]["steps"]
    assert first["planned"] != round(first["planned"]) and last["planned"] == round(last["planned"])


def test_the_other_ways(results: Cases) -> None:
    """The drop-in function, and lengths from a function of the user's, for data of other forms."""
    expected = merged(results["zb-h1-free"], "gradients")
    for case in ("dropped-in", "function"):
        assert merged(results[case], "gradients") == expected
        assert merged(results[case], "returned") == merged(results["stock"], "returned")


def close(ours: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]]) -> bool:
    """Losses and gradients agree in float32, and not bit for bit."""
    for what in ("returned", "gradients"):
        found, expected = merged(ours, what), merged(stock, what)
        assert found.keys() == expected.keys() and found != expected
        for name, given in found.items():
            one, other = (
                torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (given, expected[name])
            )
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max())):
                return False
    return True


@pytest.mark.parametrize(
    ("case", "counted"),
    [
        ("zb-h1-slices", lambda tokens: -(-tokens // 4)),
        ("v-half-slices", lambda tokens: -(-tokens // 4)),
        nightly("v-zb-slices-free", lambda tokens: -(-tokens // 4)),
        ("three-slices", lambda tokens: min(3, tokens)),
    ],
)
def test_slices_follow_the_length(results: Cases, case: str, counted: Callable[[int], int]) -> None:
    """Numbers of whole microbatches up to rounding, in the planned memory."""
    ours = results[case]
    assert close(ours, results["stock"])
    for rank in ours:
        for step in rank["steps"]:
            expected = [counted(step["tokens"][number]) for number in step["order"]]
            assert list(step["slices"] or (1,) * len(expected)) == expected
            if step["own"]:
                assert step["peak"] == pytest.approx(step["planned"], abs=1e-2)
    assert any(len({*step["slices"]}) > 1 for step in ours[0]["steps"])


def test_sliced_steps_are_the_same_under_every_schedule(results: Cases) -> None:
    one, other = results["zb-h1-slices"], results["v-half-slices"]
    for what in ("returned", "gradients"):
        assert merged(one, what) == merged(other, what)


def test_data_replicas_have_plans_of_their_own(results: Cases) -> None:
    ranks = results["replicas"]
    plans = [[step["tokens"] for step in rank["steps"]] for rank in ranks]
    assert plans[0] == plans[2] != plans[1] == plans[3]
    assert {step["tried"] for rank in ranks for step in rank["steps"]} == {True}
    assert not any(step["tried"] for step in results["zb-h1-free"][0]["steps"])  # one replica
    returned = merged(ranks, "returned")
    stock = merged(results["stock"], "returned")
    assert len(returned) == 2 * len(stock) and returned.items() >= stock.items()


def test_pipelines_that_share_experts_have_one_plan(results: Cases) -> None:
    """For the longer of their microbatches: one for which the other's experts would wait."""
    ranks = results["experts"]
    assert all(rank["steps"][0]["tokens"] == STEPS[0] for rank in ranks)
    plans = [[(step["plan"], step["order"]) for step in rank["steps"]] for rank in ranks]
    assert plans[0] == plans[1] == plans[2] == plans[3]
    assert any(list(order) != sorted(order) for _, order in plans[0])
    stock = results["experts-stock"]
    assert merged(ranks, "returned") == merged(stock, "returned")


@pytest.mark.matrix
def test_pipelines_that_share_experts_have_one_estimate(results: Cases) -> None:
    """Their first calls may name other lengths, for which passes would take other times."""
    ranks, stock = results["experts-named"], results["experts-stock"]
    plans = [[step["plan"] for step in rank["steps"]] for rank in ranks]
    assert plans[0] == plans[1] == plans[2] == plans[3]
    assert merged(ranks, "returned") == merged(stock, "returned")


def test_loss_functions_do_not_talk_to_other_replicas(results: Cases) -> None:
    for number, found in enumerate(results["collectives"]):
        *losses, text, calls = found
        assert losses == ["4.0", "4.0"]
        assert text.startswith("The loss function must not talk to data replicas"), number
        assert calls == "first second first"  # before anything is sent


def test_the_log(results: Cases) -> None:
    first, second = (rank["log"] for rank in results["v-half-free"])
    assert first.count("planned for its lengths") == 1 and "planned bubble" in first
    assert "planned for its lengths" not in second


def test_what_cannot_be_planned(results: Cases) -> None:
    """All ranks say the same, before any pass."""
    first, second = results["refusals"]
    for name, text in {
        "pairs": "of the data iterator, but it gives a tuple",
        "ended": "ended after 2 microbatches of a step",
        "function": "but it returned -1",
        "cap": "schedule v-cap",
    }.items():
        assert text in first[name] and first[name] == second[name], name
