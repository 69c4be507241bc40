"""A process, its models and its groups are as before once we are done; no wait is unwatched."""

from __future__ import annotations

import pytest

from tests.support.case_server import Cases, case_results

results = case_results("megatron.cases.lifetime_cases")


def test_every_door_leaves_the_process_as_it_was(results: Cases) -> None:
    for rank in results["given back"]:
        assert len(rank) == 10
        assert {name: changed for name, changed in rank.items() if changed} == {}


def test_what_fails_halfway_gives_it_back_too(results: Cases) -> None:
    for rank in results["failed"]:
        assert all(text != "nothing" for text, _ in rank.values())
        assert {name: changed for name, (_, changed) in rank.items() if changed} == {}


def test_late_modules_and_variables_are_given_back(results: Cases) -> None:
    for rank in results["late"]:
        assert rank["ours"] == [True, True, True, True, True]
        assert rank["stock's"] == [True, True, True, True, True]
        assert rank["again"] is True
        assert rank["postponed"][0] > 0 and rank["postponed"][1] == 0
        assert rank["losses"] == 1


def test_a_function_works_beside_enable(results: Cases) -> None:
    for rank in results["beside"]:
        *during, after = rank["puts"]
        assert len(set(during)) == 1 and during[0] > 0 and after == 0
        assert rank["losses"] == 1 and rank["holders"] == []


@pytest.mark.matrix  # torch.compile takes seconds
@pytest.mark.parametrize(
    "case",
    ["compiled", "compiled-slices", "compiled-router", "compiled-offload"],
)
def test_compiled_layers_leave_weight_gradients_to_w(results: Cases, case: str) -> None:
    for rank in results[case]:
        eager, compiled = rank["steps"]
        assert eager == compiled and rank["graphs"] > 0
        assert (eager[0] > 0) == (case != "compiled-offload")  # without W nothing is postponed


def test_replicas_with_other_counts_do_not_wait_for_each_other(results: Cases) -> None:
    for rank, found in enumerate(results["replicas"]):
        # Ranks 0 and 1 are the replicas' first stages.
        counts = [4, 4, 6, 4] if rank % 2 == 0 else [4, 4, 4]
        last = rank >= 2
        assert found["returned"] == {
            name: counts if last else [0] * len(counts)
            for name in ("offloaded, measured", "experts")
        }


def test_experts_know_where_steps_begin(results: Cases) -> None:
    """Whichever way leads to the schedule: the arena has its size, and ``auto`` tries a plan for
    three steps."""
    plans = ["4 chunks, none"] * 3 + ["2 chunks, none"]
    for rank in results["experts"]:
        for door in ("enable", "function"):
            assert rank[door, "s3"] is True
            # After a step the plan is that of the next one.
            assert rank[door, "auto"] == plans[1:] + plans[3:]


def test_pipelines_that_exchange_tokens_have_the_same_options(results: Cases) -> None:
    said = "ranks 1, 3 run with moe_pipeline_chunks 2, but 2 of 4 ranks with 1"
    for rank in results["unlike"]:
        assert rank.startswith(said)


def test_every_wait_is_over_the_ranks_of_the_call_and_watched(results: Cases) -> None:
    for rank in results["replicas"]:
        seen = rank["seen"]
        assert {name for name, _, _ in seen} >= {"all_gather_object", "barrier"}
        assert {size for _, size, _ in seen} == {2}
        assert all(watched for _, _, watched in seen)


def test_deleted_models_are_collected(results: Cases) -> None:
    for rank in results["models"]:
        assert len(rank) == 4 and set(rank.values()) == {0}


def test_destroyed_groups_are_collected_and_their_communicators_shut_down(results: Cases) -> None:
    for rank, found in enumerate(results["groups"]):
        assert found["rounds"] == [(4 if rank else 0, 0, 0, True, 0)] * 3
        assert len(set(found["threads"])) == 1


def test_a_v_returns_losses_once(results: Cases) -> None:
    """On the last pipeline rank, as stock, so that a sum over the pipeline has them once."""
    first, second = results["ends"]
    assert [row[:2] for row in first] == [(0, False)] * 3
    assert [row[:2] for row in second] == [(4, True)] * 3
    means = [row[2] for row in first]
    assert means == [row[2] for row in second] and means[0] == means[1] == means[2]
    assert 3.5 < means[0] < 5.5  # near the logarithm of the vocabulary, not twice as much


def test_the_watchdog_waits_as_long_as_the_trainers_groups(results: Cases) -> None:
    assert [found["limit"] for found in results["dense"]] == [3 * 3600] * 2
