#!/usr/bin/env python3
"""MoE layers in chunks on an emulated network and emulated experts: times, choices, memory.

    python -m benchmarks.moe [--ranks 4] [--compute-ms 60] [--repeats 5] [--parts speed,memory,...]
        [--output DIR] [--date YYYY-MM-DD]

Megatron's own MoE layer, stock and with ours, on gloo ranks of this machine. All-to-alls are real
and take, in order, as long as a network of given latency and bandwidth would; experts pause for
as long as their rows take; copies to the host go over a throttled link. Two cores are enough,
because everything that takes time sleeps.

shapes      layers of DeepSeek-V3, Qwen3-235B, Qwen3-30B and Mixtral: Megatron's own layer, the
            same with --recompute-modules moe, ours; times and most bytes at once
balances    the same for communication over computation from 1/4 to 4
speed       communication over computation from 1/4 to 4: stock, 2 and 4 chunks, all dispatches
            first, what auto chose, the best of all fixed plans
strategies  the same for what auto chose within a budget that rules keeping everything out
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
from benchmarks.moe_contenders import balances, shapes  # noqa: E402
from benchmarks.moe_emulated import (  # noqa: E402
    HIDDEN,
    IN_FLIGHT,
    KAPPA,
    TOKENS,
    TOP_K,
    Network,
    PausingExperts,
    real_all_to_all,
)
from benchmarks.moe_layers import (  # noqa: E402
    Auto,
    Bench,
    build,
    fixed_plans,
    name_of,
    settle,
)
from benchmarks.moe_page import TABLES, page  # noqa: E402
from benchmarks.page import Row, alternating  # noqa: E402
from megatron_ext.integration.features.moe.flags import layer_shape  # noqa: E402
from megatron_ext.integration.features.moe.layer import FixedPolicy  # noqa: E402
from megatron_ext.moe.autotune import SearchSpace, bucket, largest  # noqa: E402
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy, footprint  # noqa: E402

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
LINKS = (0.5, 2.0)  # a copy of the experts' input over their forward pass


def choice_row(bench: Bench, auto: Auto, candidates: dict[str, LayerPlan], repeats: int) -> Row:
    """One emulated machine: all fixed plans, stock and the choice."""
    steps = settle(bench, auto)
    for name, plan in {**candidates, "stock": STOCK}.items():
        bench.add(name, FixedPolicy(plan))
    names = ["stock", *candidates, "auto"]
    steps_of = {name: functools.partial(bench.run, name) for name in names}
    times = alternating(steps_of, repeats)
    median = {name: statistics.median(times[name]) for name in names}
    usable = [*candidates, *(["stock"] if auto.tuner.allows(STOCK) else [])]
    return {
        "steps_to_settle": steps,
        "median_ms": median,
        "least_ms": {name: min(times[name]) for name in names},
        "best": min(usable, key=lambda name: median[name]),
        "worst": max(usable, key=lambda name: median[name]),
        "chosen": name_of(auto.tuner.plan),
        "log": auto.lines,
    }


def emulate_network(ratio: float, args: Any) -> None:
    """Communication of a call over its computation: four messages, three forward passes."""
    message_ms = ratio * 3 * args.compute_ms / 4
    row_bytes = (HIDDEN + 1) * 4 * (args.ranks - 1) / args.ranks
    dist.all_to_all_single = Network(message_ms / (TOKENS * TOP_K * row_bytes))


def speed(rank: int, args: Any) -> list[Row]:
    """Nothing is restored; communication over computation varies."""
    rows = TOKENS * TOP_K
    out = []
    for ratio in RATIOS:
        emulate_network(ratio, args)
        layer = build(args.ranks)
        layer.experts = PausingExperts(args.compute_ms / rows)
        bench = Bench(layer, batch(rank))
        auto = Auto(SearchSpace.of("auto", "none"))
        bench.add("auto", auto)
        row = choice_row(bench, auto, fixed_plans((Strategy.NONE,)), args.repeats)
        out.append({"ratio": ratio, **row})
        bench.close()
        report_progress(out[-1])
    return out


def strategies(rank: int, args: Any) -> list[Row]:
    """A budget that rules ``none`` out, on fast and slow links and networks."""
    rows = TOKENS * TOP_K
    out = []
    for ratio in (0.5, 2.0):
        for link in LINKS:
            emulate_network(ratio, args)
            layer = build(args.ranks)
            layer.experts = PausingExperts(args.compute_ms / rows)
            rate = rows * HIDDEN * 4 / (link * args.compute_ms / 1e3)
            bench = Bench(layer, batch(rank), rate)
            # Half of what four microbatches keep if nothing is restored.
            shape = layer_shape(layer.config, HIDDEN, 1, 4)
            shape = shape._replace(kept_bytes=KAPPA * HIDDEN * 4)
            budget = footprint(shape, rows, IN_FLIGHT, STOCK).peak_bytes // 2
            auto = Auto(SearchSpace.of("auto", "auto"), budget)
            bench.add("auto", auto)
            rows_of_busiest = largest(bucket(rows * 1.02))  # random routing is nearly even
            fitting = {
                name: plan
                for name, plan in fixed_plans(Strategy).items()
                if footprint(shape, rows_of_busiest, IN_FLIGHT, plan).peak_bytes <= budget
            }
            row = choice_row(bench, auto, fitting, min(3, args.repeats))
            out.append({"ratio": ratio, "link": link, "budget_bytes": budget, **row})
            bench.close()
            report_progress(out[-1])
    return out


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


def batch(rank: int) -> torch.Tensor:
    """The layer's input on this rank."""
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank))


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
        compute_ms=(120.0, "of the experts' forward"),
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
    newest = {part: pages.newest(args, f"moe-{part}") for part in TABLES}
    text = page({part: data for part, data in newest.items() if data is not None})
    (args.output / "moe.md").write_text(text, encoding="utf-8")
    return 0


PARTS: dict[str, Callable[[int, Any], list[Row]]] = {
    "shapes": shapes,
    "balances": balances,
    "speed": speed,
    "strategies": strategies,
    "memory": memory,
}

if __name__ == "__main__":
    sys.exit(main())
