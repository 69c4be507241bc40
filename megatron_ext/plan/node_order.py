"""Assignment of pipeline ranks to nodes: in order, or low and high ranks on the same node.

Low pipeline ranks keep activation sets longest, so with offload their nodes need most host memory.
PipeOffload, appendix C ("enhanced node assignment"), puts low and high ranks on one node: with 16
ranks on two nodes 0 to 3 and 12 to 15 on the first. Twice as many messages then go between nodes.
Without torch; the planner counts with it, the launcher applies it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import lcm

ORDERS = ("in-order", "balanced")


def balanced(world: int, per_node: int) -> list[int]:
    """Global rank of every process, processes counted node by node.

    Every node has a block of half its processes from the low ranks and one from the high ranks. A
    process's rank modulo ``per_node`` stays its local rank, which is its device.

    Raises:
        ValueError: the nodes cannot be divided so.
    """
    half = per_node // 2
    if per_node % 2 or world % per_node:
        raise ValueError(
            f"low and high ranks share nodes of an even number of processes that divides all of "
            f"them; here are {world} with {per_node} a node"
        )
    out = [0] * world
    for node in range(world // per_node):
        high = world - (node + 1) * half
        for rank in (*range(node * half, (node + 1) * half), *range(high, high + half)):
            out[node * per_node + rank % per_node] = rank
    return out


def check_group(per_node: int, group: int) -> None:
    """Refuse halves of nodes that would divide a ``group_size`` between nodes.

    Raises:
        ValueError: they would.
    """
    if (per_node // 2) % group:
        raise ValueError(
            f"half a node is {per_node // 2} processes, which would divide the tensor-, context- "
            f"or expert-parallel groups in {group} neighbouring ranks between nodes"
        )


def group_size(tensor: int, context: int, expert: int, expert_tensor: int | None) -> int:
    """Neighbouring ranks that exchange most: of tensor and context, and of expert parallelism."""
    return lcm(tensor * context, expert * (tensor if expert_tensor is None else expert_tensor))


def host_bytes(of_rank: Sequence[int], world: int, per_node: int) -> tuple[list[int], list[int]]:
    """Host memory of every node, in order and balanced.

    Args:
        of_rank: of one process of each pipeline rank.
        world: processes; Megatron's order has those of one pipeline rank side by side.
        per_node: processes of a node.

    Raises:
        ValueError: as ``balanced``.
    """
    each = world // len(of_rank)
    orders = list(range(world)), balanced(world, per_node)
    in_order, mixed = (
        [
            sum(of_rank[rank // each] for rank in order[first : first + per_node])
            for first in range(0, world, per_node)
        ]
        for order in orders
    )
    return in_order, mixed


def new_rank(environment: Mapping[str, str], group: int) -> int:
    """The balanced rank of this process.

    Args:
        environment: as torchrun and Slurm scripts set it.
        group: as ``group_size``.

    Raises:
        ValueError: variables are missing or do not describe nodes of equal size in order, or the
            nodes cannot be divided so.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world, local, per_node = (int(environment[name]) for name in names)
        nodes = int(environment.get("GROUP_WORLD_SIZE", world // max(1, per_node)))
    except (KeyError, ValueError):
        raise ValueError(f"it needs {', '.join(names)} as torchrun sets them") from None
    if per_node < 1 or nodes * per_node != world or rank % per_node != local:
        raise ValueError(
            f"it needs nodes of equal size with their ranks in order; here process {local} of "
            f"{per_node} on its node has rank {rank} of {world}, on {nodes} nodes"
        )
    order = balanced(world, per_node)
    check_group(per_node, group)
    return order[rank]


def apply(group: int) -> None:
    """Give this process its balanced rank; before anything reads ``RANK``.

    Raises:
        ValueError: as ``new_rank``.
    """
    os.environ["RANK"] = str(new_rank(os.environ, group))
