"""Megatron's own MoE layers in chunks, under every strategy, against the same layers unchanged."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from .conftest import RANKS, needs_megatron, run

pytestmark = [needs_megatron, pytest.mark.timeout(600)]

STRATEGIES = ("none", "s1", "s2", "s3", "s4")
EXACT = ["ep2-fp64", "ep4-fp64"]
BF16 = ["ep2-bf16", "router-fp32"]
SINGLE = [
    "ep2-fp32",
    "ep4-fp32",
    "ep1",
    "ep2-dp2",
    "one-expert-a-rank",
    "tp2-ep2",
    "etp2",
    "etp2-ep2",
    "capacity",
    "expert-bias",
    "shared-experts",
    "probs-on-input",
    "relu",
    "odd-width",
    "skew",
    "few-tokens",
    "uneven-tokens",
    "padding",
    "frozen",
    "recompute",
]
COMPARED = [*EXACT, *BF16, *SINGLE]
TRAINED = ["ddp-fp32", "ddp-bf16", "ddp-fusion", "ddp-reduce-in-bf16"]
# Relative to the largest number of a tensor. bf16 has 8 bits, and each sum is rounded once.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What moe_cases.py found, run once: for each case a list with one entry a rank."""
    target = tmp_path_factory.mktemp("moe") / "results.pickle"
    done = run([sys.executable, str(RANKS / "moe_cases.py"), str(target)], 550)
    assert done.returncode == 0, done.stdout[-8000:]
    loaded: dict[str, Any] = pickle.loads(target.read_bytes())
    return loaded


def _ways(rank: dict[Any, Any]) -> list[tuple[int, str]]:
    return [key for key in rank if isinstance(key, tuple) and key[0] != "trace"]


def _difference(ours: Any, stock: Any) -> float:
    scale = float(stock.double().abs().max())
    return float((ours.double() - stock.double()).abs().max()) / (scale or 1.0)


def test_every_case_is_compared(results: dict[str, Any]) -> None:
    assert set(results) == {*COMPARED, *TRAINED}


@pytest.mark.parametrize("case", COMPARED)
def test_results_are_stocks(results: dict[str, Any], case: str) -> None:
    """Output, gradients of the input, of the router and of the experts, auxiliary losses, and the
    statistics of the expert bias; one chunk is bitwise the same, whatever is restored."""
    limit = TOLERANCE["fp64" if case in EXACT else "bf16" if case in BF16 else "fp32"]
    for rank in results[case]:
        ways = _ways(rank)
        assert len(ways) >= 3
        for way in ways:
            stock, ours = rank["stock"], rank[way]
            assert set(ours) == set(stock)
            for name in stock:
                if name == "fired":
                    continue
                if stock[name] is None:
                    assert ours[name] is None, f"{way}: {name}"
                elif way[0] == 1:
                    assert ours[name].equal(stock[name]), f"{way}: {name}"
                else:
                    assert _difference(ours[name], stock[name]) <= limit, f"{way}: {name}"
        assert _difference(rank["no_grad"], rank["stock"]["output"]) <= limit


@pytest.mark.parametrize("case", COMPARED)
def test_strategies_are_bitwise_the_same(results: dict[str, Any], case: str) -> None:
    """At the same number of chunks a restored number is the number that was there."""
    compared = 0
    for rank in results[case]:
        for chunks, strategy in _ways(rank):
            if strategy == "none" or (chunks, "none") not in rank:
                continue
            compared += 1
            plain, ours = rank[chunks, "none"], rank[chunks, strategy]
            assert [n for n in plain if n != "fired" and not _same(plain[n], ours[n])] == []
    assert compared >= 8 or case == "recompute"


def _same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or bool(a.equal(b))


@pytest.mark.parametrize("case", COMPARED)
def test_each_gradient_is_ready_once(results: dict[str, Any], case: str) -> None:
    for rank in results[case]:
        trained = [n for n, g in rank["stock"].items() if n.endswith("weight") and g is not None]
        for way in _ways(rank):
            assert rank[way]["fired"] == dict.fromkeys(trained, 1)


@pytest.mark.parametrize("case", COMPARED)
def test_all_ranks_make_the_same_calls(results: dict[str, Any], case: str) -> None:
    """Two all-to-alls a chunk and direction, and one exchange of counts, however many rows there
    are; stock's own forward and backward pass has six calls."""
    first, *others = results[case]
    world = {"ep1": 0}.get(case, 1)
    for key in [key for key in first if key[0] == "trace"]:
        _, chunks, strategy = key
        for rank in others:
            assert rank[key] == first[key], key
        if "etp" in case or case == "recompute" or (chunks, strategy) == (1, "none"):
            continue
        assert len(first[key]) == (4 * chunks + 1) * world, key


def test_empty_chunks_and_ranks_are_real(results: dict[str, Any]) -> None:
    """Guards the tests above: there are all-to-alls without a byte, and ranks without a row."""
    sizes = [n for _, n, _ in results["few-tokens"][0]["trace", 8, "none"]]
    assert sizes.count(0) >= 8
    for number, rank in enumerate(results["skew"]):
        idle = [not g.any() for n, g in rank["stock"].items() if "experts" in n]
        assert len(idle) == 4 and set(idle) == {number > 0}


@pytest.mark.parametrize("case", TRAINED)
def test_chunks_may_change_every_step(results: dict[str, Any], case: str) -> None:
    """Under DistributedDataParallel with overlap: what the optimizer gets is what stock's layers
    give, and every bucket's reduction starts at the same moment, once."""
    limit = TOLERANCE["bf16" if "bf16" in case else "fp32"]
    for rank in results[case]:
        steps = [key[1] for key in rank if len(key) == 2 and key[0] == "ours" and key[1] != "fused"]
        assert len(steps) == 7
        for step in steps:
            stock, ours = rank["stock", step], rank["ours", step]
            for name in stock:
                assert _difference(ours[name], stock[name]) <= limit, f"{step}: {name}"
            if step in (0, 3):  # one chunk
                assert all(ours[name].equal(stock[name]) for name in stock)
            assert rank["ours", step, "reduced"] == rank["stock", step, "reduced"]
            assert set(rank["ours", step, "reduced"][1]) == {1}
        assert rank["arena used"] == 0
        assert bool(rank["ours", "fused"]) == (case == "ddp-fusion")
        assert rank["ours", "fused"] == rank["stock", "fused"]
