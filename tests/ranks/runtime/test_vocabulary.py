"""Losses and gradients with a sharded vocabulary, against one process with autograd."""

from __future__ import annotations

import pytest

from tests.support.grids import sampled

NAMES = ["1f1b", "zb-h1", "interleaved", "interleaved-zb", "v-half", "v-zb", "v-min", "gis", "po"]


@pytest.mark.parametrize(
    ("name", "pp"),
    sampled(
        [(name, pp) for name in NAMES for pp in (2, 3, 4)],
        [("1f1b", 4), ("zb-h1", 3), ("interleaved-zb", 2), ("v-half", 4), ("v-zb", 2)],
    ),
)
def test_equal_to_one_process(pool, name, pp):
    found = pool.run("vocabulary", pp, name=name, microbatches=7)
    assert sum(one["losses"] for one in found) == 7
    for one in found:
        assert one["loss"] < 1e-12 and one["gradient"] < 1e-12 and one["left"] == 0
    # Token ids once each, and in order; ahead of their microbatch, but not of what there is.
    assert [one["asked"] for one in found if one["asked"]] == [list(range(7))]


@pytest.mark.parametrize(
    ("name", "pp"), [("1f1b", 4), ("zb-h1", 2), ("interleaved-zb", 3), ("v-half", 4), ("v-zb", 2)]
)
@pytest.mark.parametrize("depths", [1, 2])
def test_multi_token_prediction(pool, name, pp, depths):
    """The last stage takes embeddings too, and has a head for each depth."""
    found = pool.run("vocabulary", pp, name=name, microbatches=7, depths=depths)
    assert sum(one["losses"] for one in found) == sum(one["predicted"] for one in found) == 7
    for one in found:
        assert one["loss"] < 1e-12 and one["gradient"] < 1e-12 and one["left"] == 0


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
@pytest.mark.parametrize("depths", [0, 1])
def test_evaluation(pool, name, depths):
    given = {"name": name, "microbatches": 5, "training": False, "depths": depths}
    found = pool.run("vocabulary", 4, **given)
    assert sorted(one["losses"] for one in found) == [0, 0, 0, 5]
    assert all(one["loss"] < 1e-12 and one["left"] == 0 for one in found)
    assert [one["asked"] for one in found if one["asked"]] == [list(range(5))]


# bfloat16 keeps 8 bits; a gradient is a sum of a few terms, each rounded once or twice.
@pytest.mark.parametrize(
    ("dtype", "most"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 0.02)]
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(pool, dtype, most, sequence_parallel):
    given = {"sequence_parallel": sequence_parallel, "dtype": dtype}
    for found in pool.run("tensor_ranks", 2, **given):
        assert max(found.values()) < most, found
