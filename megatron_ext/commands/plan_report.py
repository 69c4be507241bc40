"""Output of ``plan``: the front, the chosen point's flags, every rank's bytes, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan import memory, times
from ..plan.memory import RankBytes
from ..plan.point import Point
from ..plan.post_validation import PostValidationEstimate, with_post_validation
from ..plan.search import Result
from ..plan.space import SearchSpace
from ..schedule.costs import number_to_json
from .common import short


def report_json(
    result: Result,
    space: SearchSpace,
    ignored: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    file: str | None,
) -> dict[str, Any]:
    """The whole answer; times in milliseconds, sizes in bytes.

    ``chosen`` is null where nothing fits; then ``needs`` says what would.
    """
    best = result.best
    data: dict[str, Any] = {
        "pp": space.pp,
        "gpu": space.gpu.name,
        "memory_cap_bytes": result.budget,
        "host_cap_bytes": result.host_budget,
        "front": [point_json(point) for point in result.front],
        "chosen": None,
        "simulated": len(result.points),
        "candidates": result.candidates,
        "skipped": result.skipped,
        "ignored": list(ignored),
        "assumptions": _assumptions(space, notes),
        "seconds": round(seconds, 3),
    }
    if best is not None:
        data["chosen"] = {
            **point_json(best),
            "flags": best.flags(file),
            "step_ms_by_name": number_to_json(best.as_named() / 1000)
            if best.offload is None
            else None,
            "ranks": [rank_json(rank) for rank in best.ranks],
            "post_validation": _post_validation_json(with_post_validation(best)),
        }
    else:
        least = result.smallest
        data["needs"] = {
            "bytes": least.worst.total,
            "rank": least.worst.rank,
            "part": least.worst.largest_part()[0],
            **point_json(least),
            "ranks": [rank_json(rank) for rank in least.ranks],
        }
    return data


def point_json(point: Point) -> dict[str, Any]:
    """One point; ``simulate`` gives the same with ``stage_cost`` in the file it names."""
    split, job = point.workload.split, point.workload.job
    return {
        "schedule": point.spec.name,
        "chunks": point.spec.chunks,
        "microbatches": point.spec.microbatches,
        "micro_batch_size": job.micro_batch_size,
        "cheap_recompute": job.cheap_recompute,
        "offload": point.offload,
        "layers": list(split.counts),
        "layout": None if split.even else split.text(),
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


def _post_validation_json(found: PostValidationEstimate) -> dict[str, Any]:
    return {
        "step_ms": number_to_json(found.step_us / 1000),
        "copies_bytes": max(found.copies),
        "peak_bytes": found.worst,
    }


STAGE_FILE = "STAGE_COST_FILE"


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


def report_text(
    result: Result,
    space: SearchSpace,
    ignored: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    file: str | None,
) -> str:
    """The same for people."""
    lines = [
        f"{space.pp} ranks of {space.gpu.name}, {gib(result.budget)} a rank; "
        f"{result.candidates} candidates, {len(result.points)} points simulated in {seconds:.1f} s"
    ]
    if result.skipped:
        lines.append(f"{result.skipped} more were left out; --effort 2 simulates more of them")
    lines.append("")
    best = result.best
    if best is None:
        lines += _nothing_fits(result)
    else:
        lines += [*_front(result.front), "", *_chosen(best, file)]
        lines += [_post_validation(best, result.budget), "", *_ranks(best.ranks)]
    if ignored:
        lines += ["", "ignored flags: " + " ".join(ignored)]
    lines += ["", "assumptions:"]
    lines += [f"  {text}" for text in _assumptions(space, notes)]
    return "\n".join(lines)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"


def _assumptions(space: SearchSpace, notes: Sequence[str]) -> list[str]:
    measured = [] if not space.profiles else ["times and rates: measured, from the profile"]
    computed = [*times.ASSUMPTIONS, *space.gpu.assumptions()]
    return [*notes, *memory.ASSUMPTIONS, *measured, *computed]


_HEADS = (
    *("schedule", "chunks", "mbs", "recompute", "offload", "layout"),
    *("step ms", "bubble", "peak GiB", "rank", "host GiB"),
)


def _front(points: Sequence[Point]) -> list[str]:
    """The Pareto-optimal points within the budget."""
    cells = [_HEADS, *(_cells(point) for point in points)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["Pareto-optimal in step time, device and host memory, of those that fit:"]
    for row in cells:
        first = row[0].ljust(widths[0])
        lines.append("  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]))
    return lines


def _cells(point: Point) -> tuple[str, ...]:
    spec, work = point.spec, point.workload
    name, stages = spec.name, spec.placement.num_stages
    if point.cap is not None:
        name += f" {point.cap * stages}/{stages}"
    if spec.group_size is not None:
        name += f" g={spec.group_size}"
    return (
        name,
        str(spec.chunks),
        str(work.job.micro_batch_size),
        "cheap" if work.job.cheap_recompute else "-",
        point.offload or "-",
        "even" if work.split.even else "custom",
        f"{float(point.makespan_us) / 1000:.1f}",
        f"{float(100 * point.bubble):.2f} %",
        f"{point.worst.total / 2**30:.2f}",
        str(point.worst.rank),
        f"{point.host_bytes / 2**30:.2f}",
    )


def _chosen(best: Point, file: str | None) -> list[str]:
    lines = ["flags of the fastest:"]
    lines += [f"  {words}" for words in best.flags(file)]
    if file is None and best.offload is None:
        named = best.as_named()
        if named != best.makespan_us:
            lines.append(
                f"  (--pp-cost has one cost for all stages: with an order made for it a step takes "
                f"{float(named) / 1000:.1f} ms; --output FILE.json writes the order above, for "
                "--pp-schedule FILE.json)"
            )
    return lines


def _post_validation(best: Point, budget: int) -> str:
    """What ``--pp-post-validation`` would change."""
    found = with_post_validation(best)
    gain = float(1 - found.step_us / best.makespan_us)
    if gain < 0.0005:
        return "  (--pp-post-validation would gain nothing)"
    more = found.worst - best.worst.total
    peak = f"{gib(more)} more at the peak" if more > 0 else "no more at the peak"
    if found.worst > budget:
        peak += ", which is over the budget"
    return (
        f"  (--pp-post-validation: a step takes {float(found.step_us) / 1000:.1f} ms, "
        f"{gain:.1%} less; extra {gib(max(found.copies))} at most until validated, {peak})"
    )


def _ranks(ranks: Sequence[RankBytes]) -> list[str]:
    lines = ["GiB per rank: parameters, gradients, optimizer, activations, running pass = total"]
    for rank in ranks:
        parts = (rank.states.parameters, rank.states.gradients, rank.states.optimizer)
        row = "  ".join(f"{x / 2**30:6.2f}" for x in (*parts, rank.kept, rank.passing, rank.total))
        host = f"  host {rank.host / 2**30:.2f}" if rank.host else ""
        lines.append(f"  {rank.rank:3d}  {row}  at {rank.at}{host}")
    return lines


def _nothing_fits(result: Result) -> list[str]:
    least = result.smallest
    part, size = least.worst.largest_part()
    name = least.spec.name + (f" with offload {least.offload}" if least.offload else "")
    step = short(least.makespan_us / 1000)
    return [
        f"nothing fits in {gib(result.budget)}. The least that was found to fit is "
        f"--memory-cap {least.worst.total / 2**30 + 0.005:.2f}GiB: {name}, {step} ms a step.",
        f"Rank {least.worst.rank} binds, with {gib(size)} of {part}:",
        *_ranks(least.ranks),
        "its flags would be:",
        *(f"  {words}" for words in least.flags()),
    ]
