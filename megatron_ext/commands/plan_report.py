"""Output of ``plan``: the front, the chosen point's flags, every rank's bytes, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.gpu import Gpu
from ..plan.memory import RankBytes
from ..plan.model import Job
from ..plan.point import Point
from ..plan.result import Result
from ..plan.space import SearchSpace
from ..plan.throughput import devices, expected_error, throughput
from ..schedule.costs import number_to_json
from .plan_assumed import assumptions
from .plan_moe import plan_layer_json, plan_words


def report_json(
    result: Result,
    spaces: Sequence[SearchSpace],
    ignored: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    file: str | None,
) -> dict[str, Any]:
    """The whole answer; times in milliseconds, sizes in bytes.

    ``chosen`` is null where nothing fits; then ``needs`` says what would. ``expected_error``: of
    step times, as a share. ``candidates``: configurations that may fit, by closed forms.
    """
    best = result.best
    shown = best or result.smallest
    space = space_of(spaces, shown)
    gpu = space.gpu
    data: dict[str, Any] = {
        "pp": shown.spec.pp,
        "gpu": gpu.name,
        "memory_cap_bytes": result.budget,
        "host_cap_bytes": result.host_budget,
        "front": [point_json(point, gpu) for point in result.front],
        "expected_error": expected_error(gpu, shown.job),
        "chosen": None,
        "simulated": len(result.points),
        "candidates": result.candidates,
        "ignored": list(ignored),
        "assumptions": assumptions(space, notes, len(spaces) > 1),
        "seconds": round(seconds, 3),
    }
    if len(spaces) > 1:
        data["grid"] = _grid_json(result, gpu, shown)
    if best is not None:
        data["chosen"] = {
            **point_json(best, gpu),
            "flags": best.flags(file, ours=not space.stock),
            "moe_layer": plan_layer_json(best, gpu),
            "ranks": [rank_json(rank) for rank in best.ranks],
        }
    else:
        part, size = shown.worst.largest_part()
        data["needs"] = {
            "bytes": shown.worst.total,
            "rank": shown.worst.rank,
            "part": part,
            "part_bytes": size,
            **point_json(shown, gpu),
            "flags": shown.flags(ours=not space.stock),
            "ranks": [rank_json(rank) for rank in shown.ranks],
        }
    return data


def space_of(spaces: Sequence[SearchSpace], point: Point) -> SearchSpace:
    """That of the point's division."""
    return next(one for one in spaces if division_json(one.job) == division_json(point.job))


def _grid_json(result: Result, gpu: Gpu, shown: Point) -> dict[str, Any]:
    alone = result.alone
    return {
        "world_size": devices(shown.job),
        "divisions": result.divisions,
        "cases": result.cases,
        "pruned": result.pruned,
        "searched": result.cases - result.pruned,
        "without_pipeline": None if alone is None else point_json(alone, gpu),
    }


def division_json(job: Job) -> dict[str, int]:
    """The parallel sizes."""
    return {
        "tensor": job.tensor_model_parallel_size,
        "pipeline": job.pipeline_model_parallel_size,
        "data": job.data_parallel_size,
        "context": job.context_parallel_size,
        "expert": job.expert_model_parallel_size,
        "expert_tensor": job.expert_tensor_parallel_size,
    }


def point_json(point: Point, gpu: Gpu) -> dict[str, Any]:
    """One point; ``simulate`` gives the same passes with ``stage_cost`` in the file it names.

    ``step_ms`` is of the passes, ``iteration_ms`` with the three that an iteration does beside.
    """
    split, job = point.workload.split, point.workload.job
    rate = throughput(job, gpu, point.spec.microbatches, point.iteration_us)
    beside = point.overhead
    return {
        "schedule": point.name,
        "division": division_json(job),
        "recompute": job.recompute_granularity,
        "iteration_ms": number_to_json(point.iteration_us / 1000),
        "data_parallel_ms": beside.data * 1e3,
        "context_parallel_ms": beside.context * 1e3,
        "optimizer_ms": beside.optimizer * 1e3,
        "samples_per_second": rate.tokens * devices(job) / job.seq_length,
        "tokens_per_second_per_gpu": rate.tokens,
        "tflops_per_gpu": rate.tflops,
        "mfu": rate.mfu,
        "chunks": point.spec.chunks,
        "memory_cap": None if point.cap is None else number_to_json(point.cap),
        "slices": point.spec.slices[0] if point.spec.slices else 1,
        "microbatches": point.spec.microbatches,
        "micro_batch_size": job.micro_batch_size,
        "cheap_recompute": job.cheap_recompute,
        "vocab_parallel": job.vocab_parallel,
        "moe": plan_words(job),
        "offload": point.offload,
        "offload_note": point.note,
        "layers": list(split.counts),
        "layout": None if split.even else split.flag(job)[1],
        "step_ms": number_to_json(point.makespan_us / 1000),
        "bubble": number_to_json(point.bubble),
        "peak_bytes": point.worst.total,
        "peak_rank": point.worst.rank,
        "host_bytes": point.host_bytes,
        "peak_activation": [number_to_json(x) for x in point.peak_activation],
        "peak_host_activation": [number_to_json(x) for x in point.peak_host_activation],
        "simulate": point.simulate_arguments(STAGE_FILE),
        "stage_cost": point.stage_cost(),
    }


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


STAGE_FILE = "STAGE_COST_FILE"
