"""Megatron's own part of a search space, and whether a point of it may be the answer."""

from __future__ import annotations

from dataclasses import replace

from ..schedule import GENERATORS, ScheduleSpec
from .model import Job
from .moe_job import has_experts, without_chunks
from .space import SearchSpace
from .vocabulary import BARRIERS
from .workload import Workload

STOCK = ("1f1b", "interleaved")  # Megatron's own schedules


def of_stock(space: SearchSpace) -> SearchSpace:
    """What Megatron can do by itself: its schedules and split, and full recompute."""
    job = space.job.with_(vocab_parallel=False, cheap_recompute=False)
    if has_experts(job):
        job = without_chunks(job)
    return replace(
        space,
        job=job,
        schedules=STOCK,
        cheap_recompute=(job.cheap_recompute,),
        offload=(),
        balance=False,
        always_offload=False,
        vocabulary=False,
        full_recompute=not job.cheap_recompute,
        slices=(),
        stock=True,
    )


def allows(space: SearchSpace, spec: ScheduleSpec, job: Job) -> bool:
    """True if a point of this may be the answer, whether the search proposes it or not."""
    chunks = spec.chunks in space.chunks or not GENERATORS[spec.name].any_chunks
    if spec.name not in space.schedules or not chunks:
        return False
    if space.always_offload or job.micro_batch_size not in space.micro_batch_sizes:
        return False
    full = job.recompute_granularity == "full" != space.job.recompute_granularity
    if full and not space.full_recompute:
        return False
    if not full and job.cheap_recompute not in space.cheap_recompute:
        return False
    return job.vocab_parallel or not space.job.vocab_parallel


def named(job: Job, name: str, work: Workload, chunks: int) -> ScheduleSpec:
    """A schedule of a job as training makes it: with its sharded vocabulary, or in pairs."""
    return ScheduleSpec(
        *(name, job.pipeline_model_parallel_size, work.microbatches, chunks, work.costs),
        barriers=BARRIERS * job.vocab_parallel,
        overlap=job.overlap_moe_expert_parallel_comm,
    )
