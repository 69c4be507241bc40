"""What ``plan`` prints of MoE layers in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..moe.plan import STOCK, Strategy
from ..plan import moe_job
from ..plan.gpu import Gpu
from ..plan.model import Job
from ..plan.moe_times import job_footprint, job_run, layers_of_rank
from ..plan.point import Point
from ..plan.times import price_of


def plan_words(job: Job) -> str:
    """For a table's cell: ``pairs`` of passes, ``2 s4``, ``2 none``, or a dash for Megatron's own
    layers."""
    if job.overlap_moe_expert_parallel_comm:
        return "pairs"
    plan = moe_job.fixed_plan(job)
    return "-" if plan is None else f"{plan.chunks} {plan.strategy.value}"


def plan_layer_json(point: Point, gpu: Gpu) -> dict[str, Any] | None:
    """What the plan of a point's MoE layers changes; None for Megatron's own."""
    job, in_flight = point.workload.job, float(max(point.peak_activation))
    plan = moe_job.fixed_plan(job)
    if plan is None:
        return None
    price = price_of(job, gpu)
    ours, stock = (job_run(job, gpu, price, one) for one in (plan, STOCK))
    needs = job_footprint(job, plan, round(layers_of_rank(job) * in_flight))
    return {
        "chunks": plan.chunks,
        "strategy": plan.strategy.value,
        "layer_ms": 1e3 * ours.time,
        "stock_layer_ms": 1e3 * stock.time,
        "budget_bytes": needs.peak_bytes,
    }


def plan_layer_text(data: dict[str, Any] | None, gib: Callable[[int], str]) -> list[str]:
    """``plan_layer_json`` in words."""
    if data is None:
        return []
    keeps = Strategy(data["strategy"]) is Strategy.NONE
    budget = f" {moe_job.BUDGET} {data['budget_bytes'] / 2**30 + 0.05:.1f}GiB"
    more = "" if keeps else f" {moe_job.REUSE} auto{budget}"
    return [
        f"  (an MoE layer takes {data['layer_ms']:.2f} ms a microbatch, Megatron's own "
        f"{data['stock_layer_ms']:.2f}; {gib(data['budget_bytes'])} of a rank at most; "
        f"{moe_job.CHUNKS} auto{more} tries plans in training)"
    ]
