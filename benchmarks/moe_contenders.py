"""Megatron's own MoE layer, the same with recomputation, ours: time and memory of each."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated import report_progress
from benchmarks.moe_emulated import IN_FLIGHT, Network, PausingExperts, real_all_to_all
from benchmarks.moe_layers import Auto, Bench, build, name_of, settle
from benchmarks.moe_shapes import SHAPES
from benchmarks.page import alternating
from megatron_ext.integration.features.moe.layer import FixedPolicy
from megatron_ext.moe.autotune import SearchSpace
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy

TOKENS, HIDDEN, EXPERTS = 512, 32, 16  # what really is exchanged; times and bytes are scaled
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # communication over computation
STOCK_MS = 240.0  # of Megatron's own layer as it is emulated
S4 = [LayerPlan(n, Strategy.S4) for n in (2, 4, 8)]


def shapes(rank: int, args: Any) -> list[dict[str, Any]]:
    """Layers of models that people train, slower than on the devices they are described for."""
    out = []
    for one in SHAPES:
        stock = 4 * one.message_ms + 3 * one.experts_ms
        row = _contend(
            rank, args, one.top_k, one.inside, STOCK_MS / stock,
            one.message_ms, one.experts_ms, one.input_ms,
            {"auto": ("auto", "none"), "auto in it": ("auto", "auto")},
        )  # fmt: skip
        out.append({"name": one.name, "ratio": one.ratio, **row})
        report_progress(out[-1])
    return out


def balances(rank: int, args: Any) -> list[dict[str, Any]]:
    """One shape on faster and slower networks; without auto."""
    out = []
    for ratio in RATIOS:
        message = 3 * ratio / 4  # over the experts' forward pass
        row = _contend(rank, args, 8, 1.0, STOCK_MS / (3 + 3 * ratio), message, 1.0, 1.5, {})
        out.append({"name": "", "ratio": ratio, **row})
        report_progress(out[-1])
    return out


def _contend(
    rank: int,
    args: Any,
    top_k: int,
    inside: float,
    scale: float,
    message: float,
    experts: float,
    copy: float,
    searched: dict[str, tuple[str, str]],
) -> dict[str, Any]:
    """One layer on one device.

    Args:
        inside: bytes inside the experts over those of their input.
        scale: of all times that follow, in milliseconds.
        message, experts, copy: an all-to-all of a call, the experts' forward pass, a copy of
            their input to the host.
        searched: chunks and strategies that auto chooses from, by name; with strategies, in the
            memory that recomputation needs.
    """
    rows, row = TOKENS * top_k, HIDDEN * 4
    layer = build(args.ranks, hidden_size=HIDDEN, num_moe_experts=EXPERTS, moe_router_topk=top_k)
    layer.experts = PausingExperts(0.0, HIDDEN, round(inside * HIDDEN))
    x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank))
    bench = Bench(layer, x, rows * row / (scale * copy / 1e3))
    bench.add("stock", FixedPolicy(STOCK))
    bench.add("recompute", FixedPolicy(STOCK), recompute=True)
    for plan in S4:
        bench.add(name_of(plan), FixedPolicy(plan))

    def peaks(names: list[str]) -> dict[str, int]:
        """Without pauses, which change no bytes."""
        dist.all_to_all_single = real_all_to_all
        layer.experts.set_pace(0.0)
        found = {name: bench.peak(name, IN_FLIGHT)[0] for name in names}
        dist.all_to_all_single = network
        layer.experts.set_pace(scale * experts / rows)
        return found

    network: Any = Network(scale * message / (rows * (row + 4) * (args.ranks - 1) / args.ranks))
    peak = peaks(list(bench.ours))
    # Inputs and outputs are there in any case, and no part of what a budget is for.
    budget = peak["recompute"] - 2 * IN_FLIGHT * x.numel() * 4
    autos = {
        name: Auto(SearchSpace.of(*given), budget if given[1] == "auto" else None)
        for name, given in searched.items()
    }
    steps = {}
    for name, auto in autos.items():
        bench.add(name, auto)
        steps[name] = settle(bench, auto, name)
    peak |= peaks(list(autos))
    steps_of = {name: functools.partial(bench.run, name) for name in bench.ours}
    times = alternating(steps_of, args.repeats)
    median = {name: statistics.median(found) / scale for name, found in times.items()}
    result = {
        "scale": scale,
        "median_ms": median,
        "peak_bytes": peak,
        "steps": steps,
        "chosen": {name: name_of(auto.tuner.plan) for name, auto in autos.items()},
    }
    bench.close()
    return result
