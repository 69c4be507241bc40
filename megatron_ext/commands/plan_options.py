"""Plan's advice on options beside the schedule: a sharded vocabulary, pairs of passes that hide
all-to-alls of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ..plan.model import Job
from ..plan.moe_job import fixed_plan
from ..plan.overlap import ASSUMPTIONS, is_open
from ..plan.point import Point, evaluate
from ..plan.result import Result
from ..plan.space import SearchSpace
from ..plan.throughput import expected_error
from ..plan.vocabulary import rank_work
from ..schedule.costs import number_to_json


def whole_vocabulary(result: Result, space: SearchSpace, best: Point) -> dict[str, Any] | None:
    """What ``--pp-vocab-parallel`` changes: beside the fastest point without it that was found,
    of those that fit if there are any. If it was asked for, beside the same schedule and layers
    without it. None if ``best`` is without."""
    job, spec = best.workload.job, best.spec
    if not job.vocab_parallel:
        return None
    others = [
        point
        for point in result.points
        if not point.job.vocab_parallel
        and point.is_pipeline
        and point.spec.pp == best.spec.pp
        and point.job.micro_batch_size == job.micro_batch_size
    ]
    if not others:
        work = best.workload
        work = space.workload(job.with_(vocab_parallel=False), work.microbatches, work.split)
        others = [evaluate(replace(spec, costs=work.costs, barriers=0, offload=None), work)]
    other = min([p for p in others if result.fits(p)] or others, key=Point.key)
    return {
        "schedule": other.spec.name,
        "step_ms": number_to_json(other.makespan_us / 1000),
        "peak_bytes": other.worst.total,
        "busy_ms": [number_to_json(_busy(point) / 1000) for point in (other, best)],
    }


def _busy(point: Point) -> Fraction:
    """Microseconds of one microbatch's passes on the rank with most of them."""
    return max(rank_work(point.workload.costs, point.spec.placement))


def vocabulary_text(data: dict[str, Any], gib: Callable[[int], str]) -> list[str]:
    """``whole_vocabulary`` of the chosen point for people; ``gib`` writes bytes."""
    best, whole = data["chosen"], data["chosen"].get("whole_vocabulary")
    if whole is None:
        return []
    before, after = whole["busy_ms"]
    fits = "" if whole["peak_bytes"] <= data["memory_cap_bytes"] else ", which does not fit"
    return [
        f"  (--pp-vocab-parallel: the heaviest rank computes {after:.1f} ms a microbatch and holds "
        f"{gib(best['peak_bytes'])}; without it, {whole['schedule']} takes {whole['step_ms']:.1f} "
        f"ms a step, with {before:.1f} ms and {gib(whole['peak_bytes'])} there{fits})"
    ]


_WAYS = {"pairs": "passes in pairs", "chunks": "MoE layers in chunks", "neither": "neither"}


def _way(point: Point) -> str:
    job = point.workload.job
    if job.overlap_moe_expert_parallel_comm:
        return "pairs"
    return "neither" if fixed_plan(job) is None else "chunks"


def expert_overlap(result: Result) -> dict[str, Any] | None:
    """The fastest point that fits with passes in pairs, with MoE layers in chunks, which excludes
    pairs, and with neither; None if no point has pairs. A way that does not fit is None."""
    if not any(_way(point) == "pairs" for point in result.points):
        return None
    found: dict[str, Any] = {}
    for way in _WAYS:
        own = [p for p in result.points if _way(p) == way and result.fits(p)]
        best = min(own, key=Point.key, default=None)
        found[way] = best and {
            "schedule": best.spec.name,
            "step_ms": number_to_json(best.makespan_us / 1000),
            "peak_bytes": best.worst.total,
        }
    return found


def pair_assumptions(job: Job) -> tuple[str, ...]:
    """Of passes in pairs, where they are searched."""
    return ASSUMPTIONS if job.overlap_moe_expert_parallel_comm or is_open(job) else ()


def expert_overlap_text(data: dict[str, Any], gib: Callable[[int], str]) -> list[str]:
    """``expert_overlap`` of the chosen point for people, the fastest first."""
    found = {way: one for way, one in (data["chosen"].get("expert_overlap") or {}).items() if one}
    if not found:
        return []
    least = min(one["step_ms"] for one in found.values())
    each: list[str] = []
    for way, one in sorted(found.items(), key=lambda item: item[1]["step_ms"]):
        slower = one["step_ms"] / least - 1
        time = f"{slower:.1%} more" if each else f"{least:.1f} ms a step"
        each.append(f"{_WAYS[way]} {time} ({one['schedule']}, {gib(one['peak_bytes'])})")
    return [f"  (all-to-alls of experts, the fastest that was tried: {', '.join(each)})"]


def error_to_expect(space: SearchSpace) -> float | None:
    """Of step times, as a share; None where passes were measured."""
    return None if space.profiles else expected_error(space.gpu, space.job)
