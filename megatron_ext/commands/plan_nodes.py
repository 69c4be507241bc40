"""Memory of every rank and of every node in ``plan``."""

from __future__ import annotations

from typing import Any

from ..plan import node_order
from ..plan.memory import RankBytes
from ..plan.point import Point


def nodes_json(point: Point, node: int) -> dict[str, Any] | None:
    """Host memory of every node of so many devices; None where it has one."""
    found = node_host_bytes(point, node)
    if found is None:
        return None
    return {"per_node": node, "in_order": found[0], "balanced": found[1]}


def node_host_bytes(point: Point, per_node: int) -> tuple[list[int], list[int]] | None:
    """Host memory of every node, with ranks in order and balanced (``node_order``).

    None where nothing is offloaded, there is one node, or nodes cannot be balanced.
    """
    job = point.workload.job
    each = job.tensor_model_parallel_size * job.context_parallel_size * job.data_parallel_size
    world = point.spec.pp * each
    group = node_order.group_size(
        job.tensor_model_parallel_size,
        job.context_parallel_size,
        job.expert_model_parallel_size,
        job.expert_tensor_parallel_size,
    )
    if not point.host_bytes or world <= per_node:
        return None
    try:
        node_order.check_group(per_node, group)
        return node_order.host_bytes([rank.host for rank in point.ranks], world, per_node)
    except ValueError:
        return None


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
