"""Low and high pipeline ranks on one node (PipeOffload, appendix C)."""

from __future__ import annotations

import pytest

from megatron_ext.plan import node_order


def test_the_papers_example():
    """16 ranks on two nodes: 0 to 3 and 12 to 15 on the first."""
    order = node_order.balanced(16, 8)
    assert order[:8] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sorted(order[8:]) == list(range(4, 12))


@pytest.mark.parametrize(("world", "per_node"), [(8, 8), (16, 8), (24, 8), (64, 4), (10, 2)])
def test_every_node_has_a_low_and_a_high_block(world, per_node):
    order = node_order.balanced(world, per_node)
    assert sorted(order) == list(range(world))
    assert all(rank % per_node == slot % per_node for slot, rank in enumerate(order)), "devices"
    assert order[0] == 0, "the store of rank 0 is on the first node"
    for first in range(0, world, per_node):
        ranks = sorted(order[first : first + per_node])
        half = per_node // 2
        assert ranks[:half] == list(range(ranks[0], ranks[0] + half))
        assert ranks[half:] == [world - 1 - rank for rank in reversed(ranks[:half])]


def test_the_gain_in_host_memory():
    in_order, mixed = node_order.host_bytes(list(range(16, 0, -1)), 16, 8)
    assert in_order == [100, 36] and mixed == [68, 68]
    # Two processes for each pipeline rank.
    assert node_order.host_bytes([4, 3, 2, 1], 8, 4) == ([14, 6], [10, 10])


def _environment(rank, **changes):
    base = {"RANK": rank, "WORLD_SIZE": 16, "LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": 8}
    return {name: str(value) for name, value in {**base, **changes}.items()}


def test_a_process_finds_its_rank():
    found = [node_order.new_rank(_environment(rank), 2) for rank in range(16)]
    assert found == node_order.balanced(16, 8)


@pytest.mark.parametrize(
    ("changes", "group", "text"),
    [
        ({"RANK": "x"}, 1, "it needs RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": 3}, 1, "process 3 of 8 on its node has rank 1 of 16, on 2 nodes"),
        ({"GROUP_WORLD_SIZE": 3}, 1, "nodes of equal size"),
        ({"WORLD_SIZE": 20}, 1, "nodes of equal size"),
        ({"WORLD_SIZE": 15, "LOCAL_WORLD_SIZE": 5, "LOCAL_RANK": 1}, 1, "an even number"),
        ({}, 8, "half a node is 4 processes, which would divide"),
    ],
)
def test_nodes_that_cannot_be_balanced(changes, group, text):
    with pytest.raises(ValueError, match=text):
        node_order.new_rank(_environment(1, **changes), group)


def test_groups_that_stay_on_a_node():
    assert node_order.group_size(2, 1, 1, None) == 2
    assert node_order.group_size(2, 2, 4, 1) == 4
    assert node_order.group_size(2, 1, 4, None) == 8
