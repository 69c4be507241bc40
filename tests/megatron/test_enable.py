"""``enable`` for trainers without Megatron's arguments: exact results, or one clear sentence."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.library import ModelArgs
from megatron_ext.releases import RELEASES
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import version

# The versions that trainers pin, too.
PINNED = [version(release.tag) for release in RELEASES if not release.tagged]
results = case_results("megatron.cases.enable_cases", "installed", *PINNED)


def merged(ranks: Sequence[dict[str, Any]], what: str) -> dict[str, bytes]:
    """One dictionary of those of all ranks."""
    return {key: value for rank in ranks for key, value in rank[what].items()}


@pytest.mark.parametrize(
    ("case", "stock"),
    [
        pytest.param("zb-h1-2", "stock-2", marks=pytest.mark.matrix),
        pytest.param("v-half-2", "stock-2", marks=pytest.mark.matrix),
        # By default of one process, which has the same bits.
        pytest.param("zb-h1-4", "stock-4", marks=pytest.mark.matrix),
        pytest.param("v-half-4", "stock-4", marks=pytest.mark.matrix),
        pytest.param("v-zb-4-offloaded", "stock-4", marks=pytest.mark.matrix),
        pytest.param("v-half-4-groups", "stock-4", marks=pytest.mark.matrix),
        pytest.param("zb-h1-wide", "stock-wide", marks=pytest.mark.matrix),
        pytest.param("zb-h1-wide", "stock-2", marks=pytest.mark.matrix),
        pytest.param("zb-h1-experts", "stock-experts", marks=pytest.mark.matrix),
        pytest.param("stock-chunked-experts", "stock-experts", marks=pytest.mark.matrix),
        ("zb-h1-4", "one-process"),
        ("v-half-4", "one-process"),
    ],
)
def test_three_models_are_bitwise_stocks(
    results: Cases, case: str, stock: str, request: pytest.FixtureRequest
) -> None:
    """Losses and log-probabilities of every microbatch, and the gradients of the last step."""
    ours, theirs = results[case], results[stock]
    returned = merged(theirs, "returned")
    assert len(returned) == 3 * (4 + 7 + 5)
    assert merged(ours, "returned") == returned
    gradients = merged(theirs, "gradients")
    found = merged(ours, "gradients")
    assert [name for name in gradients if found[name] != gradients[name]] == []
    assert found.keys() == gradients.keys()
    trained = [name for name in gradients if not name.startswith("reference")]
    assert all(any(gradients[name]) for name in trained)


@pytest.mark.parametrize(
    "case", ["v-half-slices", pytest.param("zb-h1-slices", marks=pytest.mark.matrix)]
)
def test_slices_are_bitwise_those_of_one_process(results: Cases, case: str) -> None:
    """Of models with experts, whose microbatches all have another length; and up to rounding they
    are whole microbatches. What a loss function returns of every token comes back whole."""
    ours, sliced, whole = (
        results[case],
        *map(results.get, ("one-process-slices", "one-process-whole")),
    )
    for what in ("returned", "gradients"):
        found, exact, close = (merged(ranks, what) for ranks in (ours, sliced, whole))
        assert found == exact and found.keys() == close.keys() and found != close
        for name, given in found.items():
            one, other = (
                torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (given, close[name])
            )
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max())), name


def test_new_numbers_of_microbatches(results: Cases) -> None:
    """Stock's results at each; the last few plans are kept."""
    ours, stock = results["v-half-new-numbers"], results["stock-new-numbers"]
    assert [rank["kept"] for rank in ours] == [3, 3]
    assert merged(ours, "returned") == merged(stock, "returned")
    gradients = merged(ours, "gradients")
    assert gradients == merged(stock, "gradients") and any(map(any, gradients.values()))


def test_what_is_returned_lies_where_megatron_has_it(results: Cases) -> None:
    for case in ("stock-2", "v-half-4"):
        *others, last = (bool(rank["returned"]) for rank in results[case])
        assert last and not any(others)


def test_pipelines_may_differ_in_their_microbatches(results: Cases) -> None:
    last = [rank["returned"] for rank in results["zb-h1-unequal"] if rank["returned"]]
    assert [len(returned) for returned in last] == [48, 57]
    stock = merged(results["stock-2"], "returned")
    assert all(last[0][key] == value for key, value in stock.items())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown", "ConfigError: 'memory' is no option of megatron_ext; it has schedule,"),
        ("no_schedule", "ConfigError: memory_cap needs schedule; add it or drop memory_cap"),
        ("nothing", "ConfigError: a trainer of your own needs schedule; give e.g. 'v-half'"),
        ("name", "'v-hlaf' is not known; did you mean v-half?"),
        ("auto", "ConfigError: schedule auto cannot be used here: it would choose the placement"),
        ("bytes", "ConfigError: memory_cap 40GiB cannot be used here: bytes need the sizes"),
        ("vocab_parallel", "ConfigError: vocab_parallel cannot be used here: trainers load and"),
        ("offload", "ConfigError: offload: must be one of off, half, full, auto, or a number of"),
        ("type", "ConfigError: profile_steps: invalid int value: 'two'"),
        ("twice", "ConfigError: megatron_ext is applied already"),
        ("replaced", "is no longer Megatron's own"),
        ("dead_apply", "call megatron_ext.enable() instead"),
        ("unused", "no forward-backward call came for schedule zb-h1"),
    ],
)
def test_refused_before_there_is_a_model(results: Cases, name: str, text: str) -> None:
    for rank in results["refusals"]:
        assert text in rank[name]


def test_the_other_extension_is_named(results: Cases) -> None:
    assert "enable_cases.py has replaced it" in results["refusals"][0]["replaced"]


def test_all_symbols_come_back(results: Cases) -> None:
    found = results["refusals"][0]
    assert "megatron.core.models.gpt.gpt_model:GPTModel.__init__" in found["hooks"]
    assert f"{len(found['hooks'])} symbols" not in found["report"]  # one is bound twice
    assert found["same_after_disable"] is True
    assert found["same_with_drop_in"] is True


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one_chunk", "schedule v-half needs 2 model chunks a rank, but there are 1"),
        ("two_chunks", "schedule zb-h1 needs 1 model chunks a rank"),
        ("no_chunks", "schedule interleaved-zb needs 2 or more model chunks"),
        ("built_before", "that is built after megatron_ext.enable()"),
        ("wrapped_before", "call megatron_ext.enable() before that"),
        ("drop_in_overlap", "call megatron_ext.enable() before that"),
        ("conflict", "layers delay weight gradients themselves"),
        ("communicator", "OtherCommunicator, which may send to other places"),
    ],
)
def test_refused_with_the_model(results: Cases, name: str, text: str) -> None:
    for rank in results["refusals-of-models"]:
        assert text in rank[name]


def test_without_overlap_a_model_may_be_wrapped_before(results: Cases) -> None:
    assert results["refusals-of-models"][0]["late_but_right"] == ""


@pytest.mark.parametrize("way", ["zb-h1", "chunked", "stock-chunked"])
def test_hooks_and_buffers_on_weights_are_stocks(results: Cases, way: str) -> None:
    """Every hook sees the same gradients as often, a trainer's own buffer gets them in place; a
    weight that carries neither has its gradient from W, the same bits."""
    for rank in results["users-weights"]:
        stock, ours = rank["stock"], rank[way]
        # Two steps of four microbatches.
        assert {n: len(seen) for n, seen in stock["seen"].items()} == dict.fromkeys(
            ("tensor", "expert", "accumulated", "node"), 8
        )
        assert ours["seen"] == stock["seen"]
        assert all(None not in seen for seen in ours["seen"].values())
        differing = [n for n, g in stock["gradients"].items() if ours["gradients"].get(n) != g]
        assert differing == [] and ours["gradients"].keys() == stock["gradients"].keys()
        assert ours["buffer"] == stock["buffer"] and any(stock["buffer"])


def test_log_names_weights_with_hooks_once(results: Cases) -> None:
    for number, rank in enumerate(results["users-weights"]):
        said = [
            line for line in rank["log"].splitlines() if "hooks that are not Megatron's" in line
        ]
        assert len(said) == 2  # two ways with W
        first = said[0]
        assert (
            f"zb-h1: on pipeline rank {number} layers compute their weight gradients in B" in first
        )
        layers = "decoder.layers.0", "decoder.layers.1"
        experts = f"{layers[0]}.mlp.experts.local_experts.0"
        for weight, why in {
            f"{layers[0]}.self_attention.linear_qkv": "tensor hook",
            f"{experts}.linear_fc1": "tensor hook",
            f"{experts}.linear_fc2": "post-accumulate-grad hook",
            f"{layers[1]}.self_attention.linear_qkv": "hook of the gradient accumulator",
        }.items():
            assert f"{weight}.weight ({why})" in first
        assert "linear_proj" not in first


def test_one_model_under_one_schedule_after_the_other(results: Cases) -> None:
    """With overlapped reductions, whose hooks the model keeps."""
    for rank in results["users-weights"]:
        again = rank["again"]
        assert set(again) == {"stock", "zb-h1", "disabled", "zb-h2 again", "zb-h1 again"}
        assert set(again.values()) == {again["stock"]}


def test_a_model_may_be_wrapped_after_its_first_call_and_again(results: Cases) -> None:
    """By a function that replaces nothing while the model is wrapped."""
    for rank in results["users-weights"]:
        late = rank["wrapped late"]
        assert late["evaluated before"] == late["again"] == late["stock"]
        assert "call megatron_ext.enable() before that" in late["overlapped"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("FullyShardedDataParallel", True),
        ("FullyShardedDataParallelV2", True),
        ("MegatronFSDP", True),
        ("DistributedDataParallel", False),
    ],
)
def test_a_model_that_megatron_shards_is_known(name: str, known: bool) -> None:
    """So that it is refused, as the launcher refuses --use-megatron-fsdp."""
    model = type(name, (), {"module": SimpleNamespace()})()
    args: Any = ModelArgs({}, [model], SimpleNamespace(), 2, 1.0, 0, 1, 1)
    assert args.use_megatron_fsdp is known and args.use_torch_fsdp2 is False
