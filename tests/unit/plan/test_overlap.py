"""Passes in pairs in the planner: what is refused, costs, and which searches try them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.moe_job import fixed_plan
from megatron_ext.plan.search import search
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import exchange_times

from .every import candidates

EXPERTS = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --swiglu "
    "--disable-bias-linear --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --untie-embeddings-and-output-weights --num-experts 64 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 1024 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 16 "
    "--pipeline-model-parallel-size 2 --world-size 32 --global-batch-size 128"
)
FLAG = "--overlap-moe-expert-parallel-comm"
GIB = 2**30
# A link on which hiding the exchange saves more than a pair's launches cost.
SLOW = gpu_of("H100").with_(network=25e9)


def job(*words, line=EXPERTS, dtype="--bf16"):
    return job_of(read(f"{line} {dtype} {' '.join(words)}".split())[0])


def space(*words, **changes):
    options = {"schedules": ("1f1b", "dualpipev"), "cheap_recompute": (False,), "offload": ()}
    return SearchSpace(job(*words), SLOW, 2, **{**options, **changes})


def test_chunks_and_pairs_exclude_each_other():
    with pytest.raises(PlanError, match=f"{FLAG}"):
        job(FLAG, "--moe-pipeline-chunks", "2")
    assert all(fixed_plan(each) is None for each, _ in space(FLAG).jobs())
    assert any(fixed_plan(each) is not None for each, _ in space().jobs())


def test_costs_are_those_that_training_takes():
    where, split = replace(space(FLAG), gpu=gpu_of("H100")), even_split(16, 4)
    work = where.workload(where.job, 8, split)
    sent = exchange_times(where.job, split, where.gpu)
    assert work.costs.exchange is not None and work.costs.stages is not None
    for (own, _), (f, *_), n in zip(work.costs.exchange, work.costs.stages, sent):
        assert abs(float(own) - 1e6 * n) < float(f) / 64
    assert where.workload(job(), 8, split).costs.exchange is None


def test_a_flag_keeps_the_search_to_pairs():
    where = space(FLAG, offload=("half",))
    assert all(one.spec.overlap for one in candidates(where))
    result = search([where], 70 * GIB)
    assert result.points and all(p.spec.overlap for p in result.points)
    assert all(point.spec.offload is None for point in result.points)
