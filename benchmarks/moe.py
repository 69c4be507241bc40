#!/usr/bin/env python3
"""MoE layers in chunks on an emulated network and emulated experts: times, choices, memory.

    python -m benchmarks.moe [--ranks 4] [--stock-ms 240] [--repeats 5] [--parts shapes,memory,...]
        [--output DIR] [--date YYYY-MM-DD]

Megatron's own MoE layer, stock and with ours, on gloo ranks of this machine. All-to-alls are real
and take, in order, as long as a network of given latency and bandwidth would; experts pause for
as long as their rows take; copies to the host go over a throttled link. Two cores are enough,
because everything that takes time sleeps.

shapes      layers of DeepSeek-V3, Qwen3-235B, Qwen3-30B and Mixtral: Megatron's own layer, the
            same with --recompute-modules moe, ours; times and most bytes at once
balances    the same for communication over computation from 1/4 to 4
memory      most bytes that exist at once while one layer runs forward and backward, counted by
            tensor storage, with real experts: stock, chunks, every strategy

Every way runs in turn in one process group. Writes results/DATE-moe-PART.json and moe.md,
which has the newest results of every part.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from benchmarks import page as pages  # noqa: E402
from benchmarks.emulated import ranks, report_progress  # noqa: E402
from benchmarks.moe_emulated import (  # noqa: E402
    IN_FLIGHT,
    Network,
    PausingExperts,
    real_all_to_all,
)
from benchmarks.moe_layers import Auto, Bench, build, name_of, settle  # noqa: E402
from benchmarks.moe_page import TABLES, page  # noqa: E402
from benchmarks.moe_shapes import SHAPES  # noqa: E402
from benchmarks.page import Row, alternating  # noqa: E402
from megatron_ext.integration.features.moe.layer import FixedPolicy  # noqa: E402
from megatron_ext.moe.autotune import SearchSpace  # noqa: E402
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy  # noqa: E402

TOKENS, HIDDEN, EXPERTS = 512, 32, 16  # what really is exchanged; times and bytes are scaled
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # communication over computation
S4 = [LayerPlan(n, Strategy.S4) for n in (2, 4, 8)]


def shapes(rank: int, args: Any) -> list[Row]:
    """Layers of models that people train, slower than on the devices they are described for."""
    out = []
    for one in SHAPES:
        stock = 4 * one.message_ms + 3 * one.experts_ms
        row = _contend(
            rank, args, one.top_k, one.inside, args.stock_ms / stock,
            one.message_ms, one.experts_ms, one.input_ms,
            {"auto": ("auto", "none"), "auto in it": ("auto", "auto")},
        )  # fmt: skip
        out.append({"name": one.name, "ratio": one.ratio, **row})
        report_progress(out[-1])
    return out


def balances(rank: int, args: Any) -> list[Row]:
    """One shape on faster and slower networks; without auto."""
    out = []
    for ratio in RATIOS:
        message = 3 * ratio / 4  # over the experts' forward pass
        row = _contend(rank, args, 8, 1.0, args.stock_ms / (3 + 3 * ratio), message, 1.0, 1.5, {})
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
) -> Row:
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


def memory(rank: int, args: Any) -> list[Row]:
    """Real experts with F = 4M; what is there anyway (parameters, input, gradients) apart."""
    dist.all_to_all_single = real_all_to_all
    hidden, tokens = 64, 1024
    layer = build(
        args.ranks,
        hidden_size=hidden,
        moe_ffn_hidden_size=4 * hidden,
        moe_router_force_load_balancing=False,  # so that the second run has the sizes of the first
    )
    x = torch.randn(tokens, 1, hidden, generator=torch.Generator().manual_seed(rank))
    out = []
    for chunks in (1, 2, 4, 8):
        for strategy in ("none", "s1", "s2", "s3", "s4"):
            name = "stock" if (chunks, strategy) == (1, "none") else f"{chunks} {strategy}"
            bench = Bench(layer, x)
            bench.add(name, FixedPolicy(LayerPlan.of(chunks, strategy)))
            peak, kept, host = bench.peak(name)
            out.append({"way": name, "peak_bytes": peak, "buffers_bytes": kept, "host_bytes": host})
            bench.close()
    report_progress(out)
    return out


def run_rank(args: argparse.Namespace, rank: int) -> Row:
    """All parts on one rank."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.ranks)
    found, state = {}, torch.get_rng_state()
    for part in args.parts.split(","):  # each with the same weights, whatever ran before
        torch.set_rng_state(state)
        model_parallel_cuda_manual_seed(1)
        found[part] = PARTS[part](rank, args)
    return found


def main() -> int:
    """Run it; returns the exit status."""
    args = pages.parser_of(
        __doc__,
        ranks=4,
        stock_ms=(240.0, "of Megatron's own layer as it is emulated"),
        repeats=5,
        parts=",".join(PARTS),
    ).parse_args()
    if args.page_of is None:
        before = pages.load()
        found = ranks(args.ranks, functools.partial(run_rank, args))
        about = pages.about(args, ("torch", "megatron-core"))
        about["load"] = f"{before} before and {pages.load()} after"
        for part, rows in found.items():
            pages.save(args, f"moe-{part}", {**about, "rows": rows})
    newest = {part: pages.newest(args.output, f"moe-{part}") for part in TABLES}
    text = page({part: data for part, data in newest.items() if data is not None})
    (args.output / "moe.md").write_text(text, encoding="utf-8")
    return 0


PARTS: dict[str, Callable[[int, Any], list[Row]]] = {
    "shapes": shapes,
    "balances": balances,
    "memory": memory,
}

if __name__ == "__main__":
    sys.exit(main())
