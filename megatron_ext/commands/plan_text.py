"""Text of ``plan``'s answer: the front, the chosen point's flags, every rank's bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from ..view.timeline import decimal
from .plan_moe import plan_layer_text


def report_text(data: dict[str, Any], rows: Sequence[str]) -> str:
    """``report_json``'s answer for people; ``rows`` of its points."""
    grid = data.get("grid")
    lines = [
        f"{data['pp'] if grid is None else grid['world_size']} "
        f"{'ranks of' if grid is None else 'x'} {data['gpu']}, "
        f"{gib(data['memory_cap_bytes'])} a rank; {_looked_at(data)}"
    ]
    lines.append("")
    if data["chosen"] is None:
        lines += [*nothing_fits_text(data), "", *rows]
    else:
        heading = "Pareto-optimal in time of an iteration, device and host memory, of what was "
        lines += [f"{heading}simulated and fits:", *rows, "", *chosen_text(data)]
    if grid is not None and grid["without_pipeline"] is not None:
        alone = grid["without_pipeline"]
        cost = f"{alone['iteration_ms']:.1f} ms an iteration, {gib(alone['peak_bytes'])}"
        sizes = ", ".join(f"{head} {alone['division'][kind]}" for head, kind in _DIVISION.items())
        lines += ["", f"without a pipeline, on stock Megatron: {sizes}: {cost}"]
    if data["ignored"]:
        lines += ["", "not modelled: " + " ".join(data["ignored"])]
    return "\n".join(lines)


def _looked_at(data: dict[str, Any]) -> str:
    grid = data.get("grid")
    of = "" if grid is None else f"{grid['divisions']} divisions; "
    return (
        f"{of}{data['candidates']} candidates, {data['simulated']} points simulated in "
        f"{data['seconds']:.1f} s"
    )


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"


_DIVISION = {"TP": "tensor", "PP": "pipeline", "DP": "data", "CP": "context", "EP": "expert"}


def _name(point: dict[str, Any]) -> str:
    name, stages = point["schedule"], len(point["layers"])
    if point["memory_cap"] is not None:
        name += f" {round(point['memory_cap'] * stages)}/{stages}"
    if point["slices"] > 1:
        name += f" /{point['slices']}"
    return str(name)


def _layout(point: dict[str, Any]) -> str:
    """Whether the layers are even; if not, whether by the user's own flags, or a layout's."""
    if point["layout"] is not None:
        return "custom"
    return "even" if len(set(point["layers"])) == 1 else "given"


# A column of a table of points: its head, and a cell of the JSON.
_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "chunks": itemgetter("chunks"),
    "mbs": itemgetter("micro_batch_size"),
    "recompute": lambda p: "cheap" if p["cheap_recompute"] else p["recompute"] or "-",
    "moe": itemgetter("moe"),
    "vocab": lambda p: "sharded" if p["vocab_parallel"] else "-",
    "offload": lambda p: p["offload"] or "-",
    "layout": _layout,
    "iteration ms": lambda p: f"{p['iteration_ms']:.1f}",
    "tok/s/GPU": lambda p: f"{p['tokens_per_second_per_gpu']:.0f}",
    "MFU": lambda p: f"{100 * p['mfu']:.1f} %",
    "bubble": lambda p: f"{100 * p['bubble']:.2f} %",
    "peak GiB": lambda p: f"{p['peak_bytes'] / 2**30:.2f}",
    "rank": itemgetter("peak_rank"),
    "host GiB": lambda p: f"{p['host_bytes'] / 2**30:.2f}",
}


def table_of(points: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Heads and cells of points; with parallel sizes where they differ."""
    several = len({tuple(point["division"].values()) for point in points}) > 1
    sizes = _DIVISION if several else {}
    rows = [["schedule", *sizes, *_COLUMNS]]
    for point in points:
        division = (point["division"][kind] for kind in sizes.values())
        found = (cell(point) for cell in _COLUMNS.values())
        rows.append([_name(point), *map(str, division), *map(str, found)])
    return rows


def chosen_text(data: dict[str, Any]) -> list[str]:
    """The flags of the fastest point that fits, and its ranks."""
    best = data["chosen"]
    model = data.get("model_flags") or []
    lines = [*_iteration(best), *error_text(data)]
    lines += ["flags of the model:", *(f"  {words}" for words in model), ""] if model else []
    lines += _chosen(data)
    return [*lines, "", *_ranks(best["ranks"])]


def difference_text(data: dict[str, Any]) -> list[str]:
    """What to change in the user's own flags; nothing if there are none."""
    if not data["difference"]:
        return []
    return ["", "difference to your flags:", *(f"  {each}" for each in data["difference"])]


def _iteration(best: dict[str, Any]) -> list[str]:
    """What an iteration's time is made of."""
    parts = ("data_parallel_ms", "context_parallel_ms", "optimizer_ms")
    return [
        "an iteration of the first: {:.1f} ms of passes, {:.1f} of data-parallel exchange, {:.1f} "
        "of context-parallel exchange, {:.1f} of the optimizer; {:.3g} samples/s, {:.0f} "
        "TFLOP/s a GPU".format(
            best["step_ms"],
            *(best[each] for each in parts),
            best["samples_per_second"],
            best["tflops_per_gpu"],
        ),
        "",
    ]


def error_text(data: dict[str, Any]) -> list[str]:
    """What step times are worth, and an empty line."""
    return [f"step times: expect an error of {data['expected_error']:.0%}", ""]


def _chosen(data: dict[str, Any]) -> list[str]:
    best = data["chosen"]
    lines = ["flags of the fastest:", *(f"  {words}" for words in best["flags"])]
    if best["division"]["pipeline"] == 1:
        lines.append("  (without a pipeline: stock Megatron, no schedule of ours)")
    lines += plan_layer_text(best.get("moe_layer"))
    if best["offload_note"]:
        lines.append(f"  ({best['offload_note']})")
    return lines


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
        f"{decimal(least['iteration_ms'])} ms an iteration.",
        *error_text(data)[:1],
        f"Rank {least['rank']} binds, with {gib(least['part_bytes'])} of {least['part']}:",
        *_ranks(least["ranks"]),
        "its flags would be:",
        *(f"  {words}" for words in least["flags"]),
    ]


def assumptions_text(data: dict[str, Any], every: bool) -> list[str]:
    """How many there are, and those that matter most; or all."""
    if not every:
        # What the user's flags lack may change more than any schedule does.
        lacking = [f"assumed: {each}" for each in data["assumptions"] if each.startswith("no --")]
        return ["", *lacking, f"{len(data['assumptions'])} assumptions; --verbose lists them"]
    return ["", "assumptions:", *(f"  {each}" for each in data["assumptions"])]
