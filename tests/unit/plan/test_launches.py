"""What the device waits for the host to launch."""

from __future__ import annotations

import pytest

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.launches import HOST_S, of_experts
from tests.unit.plan.shapes import BASE


def job(more):
    return job_of(read(f"{BASE} {more}".split())[0])


@pytest.mark.parametrize(
    ("more", "kernels"),
    [
        ("", (0, 0)),  # the host runs ahead
        ("--num-experts 8", (40, 152)),
        ("--num-experts 8 --moe-grouped-gemm", (16, 32)),
        ("--num-experts 8 --moe-grouped-gemm --fp8-format e4m3 --fp8-recipe mxfp8", (64, 112)),
    ],
)
def test_each_expert_of_a_rank_is_launched(more, kernels):
    found = of_experts(job(more), 8)
    assert (found.launches, found.launches_back) == kernels and HOST_S > 0
