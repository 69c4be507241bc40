"""Megatron's own MoE layers in chunks, under every strategy, against the same layers unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly
from tests.support.grids import sampled

STRATEGIES = ("none", "s0", "s1", "s2", "s3", "s4")
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
    "latent",
    "probs-on-input",
    "allgather",
    "allgather-etp2-ep2",
    "relu",
    "odd-width",
    "skew",
    "few-tokens",
    "uneven-tokens",
    "padding",
    "frozen",
    "hooked",
    "recompute",
]
QUANTIZED = ["fp8", "fp8-recompute"]
FLEX = ["flex", "flex-recompute", "flex-unusual"]
# DeepEP's calls by chunks (0: stock), forward | backward; S goes to the experts, R comes back.
FORWARD = {"S": "dispatch", "R": "combine"}
BACKWARD = {"S": "dispatch again", "R": "combine gradients"}
ORDERS = {0: "SR|SR", 2: "SSRR|SSRR", 4: "SSRSRSRR|SSRSRSRR"}
COMPARED = [*EXACT, *BF16, *SINGLE]
# At night: products of what the others have one by one. All ways of ep2-fp64 run by default.
PRODUCTS = ("ep2-bf16", "ep2-fp32", "ep4-fp32", "etp2", "allgather-etp2-ep2", "one-expert-a-rank")
PRODUCTS += ("ep4-fp64",)
SAMPLED = sampled(COMPARED, [case for case in COMPARED if case not in PRODUCTS])
AUTO = ["auto", "auto-recompute"]
TRAINED = ["ddp-fp32", "ddp-bf16", "ddp-fusion", "ddp-reduce-in-bf16"]
# Relative to the largest number of a tensor. bf16 has 8 bits, and each sum is rounded once.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}


results = case_results("megatron.cases.moe_cases", first=True)


def _ways(rank: dict[Any, Any]) -> list[tuple[int, str]]:
    return [key for key in rank if isinstance(key, tuple) and key[0] not in ("trace", "fused")]


def _difference(ours: Any, stock: Any) -> float:
    scale = float(stock.double().abs().max())
    return float((ours.double() - stock.double()).abs().max()) / (scale or 1.0)


@pytest.mark.parametrize("case", SAMPLED)
def test_results_are_stocks(results: Cases, case: str) -> None:
    """Output, gradients of the input, of the router and of the experts, auxiliary losses, and the
    statistics of the expert bias; one chunk is bitwise the same, whatever is restored, as long as
    stock sums the experts' outputs where they are summed here."""
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
                elif way[0] == 1 and not case.startswith("allgather"):
                    assert ours[name].equal(stock[name]), f"{way}: {name}"
                else:
                    assert _difference(ours[name], stock[name]) <= limit, f"{way}: {name}"
        assert _difference(rank["no_grad"], rank["stock"]["output"]) <= limit


@pytest.mark.parametrize("case", SAMPLED)
def test_strategies_are_bitwise_the_same(results: Cases, case: str) -> None:
    """At the same number of chunks a restored number is the number that was there. Experts' weight
    gradients are one product over all rows with none and s0, otherwise a sum over chunks."""
    compared = 0
    for rank in results[case]:
        for chunks, strategy in _ways(rank):
            if strategy == "none" or (chunks, "none") not in rank:
                continue
            compared += 1
            plain, ours = rank[chunks, "none"], rank[chunks, strategy]
            summed = rank[chunks, "none" if strategy == "s0" else "s4"]
            for name in set(plain) - {"fired"}:
                wanted = summed if ".local_experts." in name else plain
                assert _same(wanted[name], ours[name]), f"{chunks}, {strategy}: {name}"
    assert compared >= 8 or case == "recompute"


def test_one_product_over_all_chunks(results: Cases) -> None:
    """Of each weight and call where the experts' input is kept, as in stock; else one a chunk. Each
    reads and writes the whole of main_grad. Ranks without a row in a chunk make none for it."""
    for rank in results["ddp-fusion"]:
        steps = [key[1] for key in rank if key[0] == "ours" and key[-1] == "products"]
        assert len(steps) == 7
        for step in steps:
            chunks, strategy = rank["ours", step, "plan"]
            stock, ours = rank["stock", step, "products"], rank["ours", step, "products"]
            if strategy in ("none", "s0"):
                assert ours == stock > 0
            else:
                assert stock <= ours <= chunks * stock and (ours > stock or chunks == 1)


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_experts(results: Cases, case: str) -> None:
    """Blockwise FP8: each row has scales of its own, so all but weight gradients are stock's bit
    for bit, and those of one chunk too; what is computed again is quantized again."""
    for rank in results[case]:
        stock = rank["stock"]
        for way in _ways(rank):
            ours = rank[way]
            for name in set(stock) - {"fired"}:
                if "experts" not in name or way[0] == 1:
                    assert ours[name].equal(stock[name]), f"{way}: {name}"
                else:
                    assert _difference(ours[name], stock[name]) < 1e-3, f"{way}: {name}"
                    assert ours[name].equal(rank[way[0], "none"][name]), f"{way}: {name}"
        assert rank["no_grad"].equal(stock["output"])


@pytest.mark.parametrize("case", FLEX)
def test_chunks_of_the_flex_dispatcher(results: Cases, case: str) -> None:
    """Megatron's own dispatcher carries each chunk by DeepEP's calls, of which the next chunk's
    dispatch is issued before the experts of this one; each parameter is ready once."""
    for rank in results[case]:
        stock = rank["stock"]
        for way in _ways(rank):
            frozen = {name for name, gradient in stock.items() if gradient is None}
            assert frozen == {name for name, gradient in rank[way].items() if gradient is None}
            for name in set(stock) - {"fired"} - frozen:
                assert _difference(rank[way][name], stock[name]) <= 2e-2, f"{way}: {name}"
            assert rank[way]["output"].equal(stock["output"])
            assert rank[way]["fired"] == stock["fired"]
        if case == "flex":
            for chunks, order in ORDERS.items():
                forward, backward = order.split("|")
                names = [FORWARD[x] for x in forward] + [BACKWARD[x] for x in backward]
                assert rank["fused", chunks] == names
        else:
            assert rank["fused", 2].count("dispatch") == 2 * rank["fused", 0].count("dispatch")
        assert rank["no_grad"].equal(stock["output"])


def _same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or bool(a.equal(b))


@pytest.mark.parametrize("case", SAMPLED)
def test_each_gradient_is_ready_once(results: Cases, case: str) -> None:
    for rank in results[case]:
        trained = [n for n, g in rank["stock"].items() if n.endswith("weight") and g is not None]
        for way in _ways(rank):
            assert rank[way]["fired"] == dict.fromkeys(trained, 1)


@pytest.mark.parametrize("case", SAMPLED)
def test_all_ranks_make_the_same_calls(results: Cases, case: str) -> None:
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


def test_empty_chunks_and_ranks_are_real(results: Cases) -> None:
    """Guards the tests above: there are all-to-alls without a byte, and ranks without a row."""
    sizes = [n for _, n, _ in results["few-tokens"][0]["trace", 8, "none"]]
    assert sizes.count(0) >= 8
    for number, rank in enumerate(results["skew"]):
        idle = [not g.any() for n, g in rank["stock"].items() if "experts" in n]
        assert len(idle) == 4 and set(idle) == {number > 0}


@pytest.mark.parametrize("case", sampled(AUTO, AUTO[:1]))
def test_what_auto_tries_changes_no_result(results: Cases, case: str) -> None:
    """Each plan runs three steps of training, Megatron's own layer among them, on all ranks alike;
    under recomputation too."""
    first, second = results[case]
    assert first["trace"] == second["trace"] and first["chosen"] == second["chosen"]
    for rank in (first, second):
        for step in range(20):
            stock, ours = rank["stock", step], rank["ours", step]
            for name in stock:
                assert _difference(ours[name], stock[name]) <= 1e-5, f"{step}: {name}"
            assert rank["ours", step, "reduced"] == rank["stock", step, "reduced"]
        assert rank["arena used"] == 0
        ran = [rank["ours", step, "plan"] for step in range(20)]
        plans = [(4, "s4"), (4, "s3"), (4, "s0")] * (case == "auto")
        plans += [(4, "none"), (2, "none"), (1, "none")]
        trials = 3 * len(plans)
        assert ran[:trials] == [plan for plan in plans for _ in range(3)]
        chosen = rank["chosen"].chunks, rank["chosen"].strategy.value
        assert set(ran[trials:]) == {chosen} <= set(plans)


@pytest.mark.parametrize(
    "case",
    # Sums in bf16 are in tests/ranks/moe/test_launches.py.
    [nightly("ddp-fp32"), nightly("ddp-bf16"), "ddp-fusion", nightly("ddp-reduce-in-bf16")],
)
def test_chunks_may_change_every_step(results: Cases, case: str) -> None:
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


scheduled = case_results("megatron.cases.moe_schedule_cases", first=True)


SCHEDULED = [
    "zb-h1-s4/3s",
    "v-half-none/3",
    "zb-h1-act/3-te",
    "v-zb-s2/3s-te",
    "zb-h1-none/3-te-fused",
    "v-half-s3/3s-fusion",
    "zb-h1-s0/3-fusion",
    "zb-h1-none/3-bf16",
    "v-half-none-offload/3",
    "zb-h1-s1-offload/3s",
    "zb-h1-s0-offload/3",
]
NIGHTLY = ("v-half-s3/3s-fusion", "zb-h1-s0-offload/3")
# bf16 is what the stock script trains in; fused products of Transformer Engine without chunks are
# in test_wgrad_split.
NIGHTLY += ("zb-h1-none/3-bf16", "zb-h1-none/3-te-fused")
# Parts of other cases: these strategies under offload, and fused passes.
NIGHTLY += ("zb-h1-s1-offload/3s", "zb-h1-s0/3-fusion", "zb-h1-act/3-te")
NIGHTLY += ("zb-h1-s4/3s", "v-half-none/3")


@pytest.mark.parametrize("case", sampled(SCHEDULED, [c for c in SCHEDULED if c not in NIGHTLY]))
def test_schedules_give_stocks_gradients_bit_for_bit(scheduled: Cases, case: str) -> None:
    """With W passes of their own or in B, with late copies and let-go memory full of NaN; against
    stock's schedule with the same chunks."""
    ours, stock = scheduled[case], scheduled["stock/" + case.partition("/")[2]]
    assert ours["losses"] == stock["losses"] and any(stock["losses"])
    assert set(ours["gradients"]) == set(stock["gradients"])
    assert [n for n, g in stock["gradients"].items() if ours["gradients"][n] != g] == []
    assert [extra["left"] for extra in ours["extra"]] == [[0]] * 4
    for rank in ours["extra"]:
        # From the second iteration on every bucket is reduced while passes run, once.
        assert all(step == [["passes"]] * rank["groups"] for step in rank["steps"][1:])
