"""Output of ``plan``: the front, the chosen point's flags, every rank's bytes, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan import memory, moe_times, times
from ..plan.gpu import NODE
from ..plan.memory import RankBytes
from ..plan.point import Point
from ..plan.search import Result
from ..plan.space import SearchSpace
from ..schedule.costs import number_to_json
from ..view.timeline import decimal
from .network import network_json, network_text
from .plan_moe import plan_layer_json, plan_layer_text, plan_words
from .plan_options import (
    error_to_expect,
    expert_overlap,
    expert_overlap_text,
    pair_assumptions,
    post_validation_json,
    post_validation_text,
    vocabulary_text,
    whole_vocabulary,
)


def report_json(
    result: Result,
    space: SearchSpace,
    ignored: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    file: str | None,
    node: int | None,
) -> dict[str, Any]:
    """The whole answer; times in milliseconds, sizes in bytes; host memory of ``node`` devices,
    if None of 8.

    ``chosen`` is null where nothing fits; then ``needs`` says what would. ``expected_error``: of
    step times, as a share; null where passes were measured.
    """
    best = result.best
    data: dict[str, Any] = {
        "pp": space.pp,
        "gpu": space.gpu.name,
        **network_json(space.network),
        "memory_cap_bytes": result.budget,
        "host_cap_bytes": result.host_budget,
        "front": [point_json(point) for point in result.front],
        "expected_error": error_to_expect(space),
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
            "moe_layer": plan_layer_json(best, space.gpu),
            "expert_overlap": expert_overlap(result),
            "whole_vocabulary": whole_vocabulary(result, space, best),
            "ranks": [rank_json(rank) for rank in best.ranks],
            "node_host_bytes": _nodes_json(best, node or NODE),
            "post_validation": post_validation_json(best),
        }
    else:
        least = result.smallest
        part, size = least.worst.largest_part()
        data["needs"] = {
            "bytes": least.worst.total,
            "rank": least.worst.rank,
            "part": part,
            "part_bytes": size,
            **point_json(least),
            "flags": least.flags(),
            "ranks": [rank_json(rank) for rank in least.ranks],
        }
    return data


def point_json(point: Point) -> dict[str, Any]:
    """One point; ``simulate`` gives the same with ``stage_cost`` in the file it names."""
    split, job = point.workload.split, point.workload.job
    return {
        "schedule": point.spec.name,
        "chunks": point.spec.chunks,
        "memory_cap": None if point.cap is None else number_to_json(point.cap),
        "group_size": point.spec.group_size,
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


def _nodes_json(point: Point, node: int) -> dict[str, Any] | None:
    found = point.node_host_bytes(node)
    if found is None:
        return None
    return {"per_node": node, "in_order": found[0], "balanced": found[1]}


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


def report_text(data: dict[str, Any], file: str | None, rows: Sequence[str]) -> str:
    """``report_json``'s answer for people; ``file`` as there, ``rows`` of its points."""
    lines = [
        f"{data['pp']} ranks of {data['gpu']}, {gib(data['memory_cap_bytes'])} a rank; "
        f"{data['candidates']} candidates, {data['simulated']} points simulated in "
        f"{data['seconds']:.1f} s"
    ]
    if data["skipped"]:
        lines.append(f"{data['skipped']} more were left out; --effort 2 simulates more of them")
    lines.append("")
    if data["chosen"] is None:
        lines += [*nothing_fits_text(data), "", *rows]
    else:
        heading = "Pareto-optimal in step time, device and host memory, of those that fit:"
        lines += [heading, *rows, "", *chosen_text(data, file)]
    if data["ignored"]:
        lines += ["", "ignored flags: " + " ".join(data["ignored"])]
    return "\n".join(lines)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"


def _assumptions(space: SearchSpace, notes: Sequence[str]) -> list[str]:
    ways = network_text(space.network).removeprefix("; ")
    notes = [*([f"messages: {ways}"] if ways else []), *notes]
    measured = [] if not space.profiles else ["times and rates: measured, from the profile"]
    job = space.job
    experts: tuple[str, ...] = moe_times.ASSUMPTIONS if job.num_experts else ()
    experts += pair_assumptions(job)
    computed = [*times.ASSUMPTIONS, *experts, *space.gpu.assumptions()]
    return [*notes, *memory.ASSUMPTIONS, *measured, *computed]


ROW_HEADS = (
    *("schedule", "chunks", "mbs", "recompute", "moe", "vocab", "offload", "layout"),
    *("step ms", "bubble", "peak GiB", "rank", "host GiB"),
)


def point_cells(point: dict[str, Any]) -> tuple[str, ...]:
    """One row of the front."""
    name, stages = point["schedule"], len(point["layers"])
    if point["memory_cap"] is not None:
        name += f" {round(point['memory_cap'] * stages)}/{stages}"
    if point["group_size"] is not None:
        name += f" g={point['group_size']}"
    return (
        name,
        str(point["chunks"]),
        str(point["micro_batch_size"]),
        "cheap" if point["cheap_recompute"] else point.get("recompute") or "-",
        point["moe"],
        "sharded" if point["vocab_parallel"] else "-",
        point["offload"] or "-",
        _layout(point),
        f"{point['step_ms']:.1f}",
        f"{100 * point['bubble']:.2f} %",
        f"{point['peak_bytes'] / 2**30:.2f}",
        str(point["peak_rank"]),
        f"{point['host_bytes'] / 2**30:.2f}",
    )


def _layout(point: dict[str, Any]) -> str:
    """Whether the layers are even; if not, whether by the user's own flags, or a layout's."""
    if point["layout"] is not None:
        return "custom"
    return "even" if len(set(point["layers"])) == 1 else "given"


def chosen_text(data: dict[str, Any], file: str | None) -> list[str]:
    """The flags of the fastest point that fits, and its ranks; ``file`` as ``report_json``."""
    best = data["chosen"]
    model = data.get("model_flags") or []
    lines = error_text(data)
    lines += ["flags of the model:", *(f"  {words}" for words in model), ""] if model else []
    lines += [*_chosen(best, file), *_replaced(data), *vocabulary_text(data, gib)]
    lines += expert_overlap_text(data, gib)
    lines += [post_validation_text(data, gib), "", *_ranks(best["ranks"])]
    return lines


def error_text(data: dict[str, Any]) -> list[str]:
    """What step times are worth, and an empty line; nothing where passes were measured."""
    error = data["expected_error"]
    if error is None:
        return []
    return [
        f"step times: expect an error of {error:.0%}, that of passes that were measured and not "
        "fitted to (--calibration)",
        "",
    ]


def _chosen(best: dict[str, Any], file: str | None) -> list[str]:
    lines = ["flags of the fastest:", *(f"  {words}" for words in best["flags"])]
    lines += plan_layer_text(best.get("moe_layer"), gib)
    named = best["step_ms_by_name"]
    if file is None and named not in (None, best["step_ms"]):
        lines.append(
            f"  (with the order that training makes for these flags a step takes {named:.1f} ms; "
            "--output FILE.json writes the order above, for --pp-schedule FILE.json)"
        )
    if best["offload_note"]:
        lines.append(f"  ({best['offload_note']})")
    nodes = best["node_host_bytes"]
    if nodes is not None:
        most, even = max(nodes["in_order"]), max(nodes["balanced"])
        lines.append(
            f"  (host memory of the fullest node of {nodes['per_node']}: {gib(most)}; with the "
            f"launcher's --node-order balanced {gib(even)}, {1 - even / most:.0%} less, and twice "
            "the messages between nodes)"
        )
    return lines


def _replaced(data: dict[str, Any]) -> list[str]:
    """Which of the user's own flags do not go with those of the answer."""
    flags = ", ".join(data.get("replaced_flags") or ())
    return [f"  (leave out your own {flags}: the flags above replace them)"] if flags else []


_PARTS = ("parameters", "gradients", "optimizer", "activations", "running_pass", "total")


def _ranks(ranks: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["GiB per rank: parameters, gradients, optimizer, activations, running pass = total"]
    for rank in ranks:
        row = "  ".join(f"{rank[part] / 2**30:6.2f}" for part in _PARTS)
        host = f"  host {rank['host'] / 2**30:.2f}" if rank["host"] else ""
        lines.append(f"  {rank['rank']:3d}  {row}  at {rank['at']}{host}")
    return lines


def nothing_fits_text(data: dict[str, Any]) -> list[str]:
    """What would fit in how many bytes."""
    least = data["needs"]
    name = least["schedule"] + (f" with offload {least['offload']}" if least["offload"] else "")
    return [
        f"nothing fits in {gib(data['memory_cap_bytes'])}. The least that was found to fit is "
        f"--memory-cap {least['bytes'] / 2**30 + 0.005:.2f}GiB: {name}, "
        f"{decimal(least['step_ms'])} ms a step.",
        *error_text(data)[:1],
        f"Rank {least['rank']} binds, with {gib(least['part_bytes'])} of {least['part']}:",
        *_ranks(least["ranks"]),
        "its flags would be:",
        *(f"  {words}" for words in least["flags"]),
        *_replaced(data),
    ]
