"""What ``plan`` prints of MoE layers in chunks."""

from __future__ import annotations

from typing import Any

from ..moe.plan import STOCK
from ..plan.gpu import Gpu
from ..plan.model import Job
from ..plan.moe_job import CHUNKS, REUSE, fixed_plan
from ..plan.moe_times import job_run
from ..plan.point import Point
from ..plan.times import price_of


def plan_words(job: Job) -> str:
    """For a table's cell: ``pairs`` of passes, ``2 s4``, ``2 none``, or a dash for Megatron's own
    layers."""
    if job.overlap_moe_expert_parallel_comm:
        return "pairs"
    plan = fixed_plan(job)
    return "-" if plan is None else f"{plan.chunks} {plan.strategy.value}"


def plan_layer_json(point: Point, gpu: Gpu) -> dict[str, Any] | None:
    """What the plan of a point's MoE layers changes; None for Megatron's own."""
    job = point.workload.job
    plan = fixed_plan(job)
    if plan is None:
        return None
    price = price_of(job, gpu)
    ours, stock = (job_run(job, gpu, price, one) for one in (plan, STOCK))
    return {
        "chunks": plan.chunks,
        "strategy": plan.strategy.value,
        "layer_ms": 1e3 * ours.time,
        "stock_layer_ms": 1e3 * stock.time,
    }


def plan_layer_text(data: dict[str, Any] | None) -> list[str]:
    """``plan_layer_json`` in words."""
    if data is None:
        return []
    return [
        f"  (an MoE layer takes {data['layer_ms']:.2f} ms a microbatch, Megatron's own "
        f"{data['stock_layer_ms']:.2f}; {CHUNKS} auto {REUSE} auto tries plans in training)"
    ]
