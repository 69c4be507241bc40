"""Memory of every rank and of every node in ``plan``."""

from __future__ import annotations

from typing import Any

from ..plan import node_order
from ..plan.memory import RankBytes
from ..plan.point import Point


def nodes_json(point: Point, node: int) -> dict[str, Any] | None:
    """Host memory of every node of so many devices, with ranks in order and balanced
    (``node_order``); None where nothing is offloaded, there is one node, or nodes cannot be
    balanced."""
    job = point.workload.job
    each = job.tensor_model_parallel_size * job.context_parallel_size * job.data_parallel_size
    world = point.spec.pp * each
    group = node_order.group_size(
        job.tensor_model_parallel_size,
        job.context_parallel_size,
        job.expert_model_parallel_size,
        job.expert_tensor_parallel_size,
    )
    if not point.host_bytes or world <= node:
        return None
    try:
        node_order.check_group(node, group)
        hosts = [rank.host for rank in point.ranks]
        in_order, balanced = node_order.host_bytes(hosts, world, node)
    except ValueError:
        return None
    return {"per_node": node, "in_order": in_order, "balanced": balanced}


def rank_json(rank: RankBytes) -> dict[str, Any]:
    """One rank's peak, in bytes, by part."""
    return {
        "rank": rank.rank,
        "parameters": rank.states.parameters,
        "gradients": rank.states.gradients,
        "optimizer": rank.states.optimizer,
        "activations": rank.kept,
        "running_pass": rank.passing,
        "total": rank.total,
        "host": rank.host,
        "at": rank.at,
    }
