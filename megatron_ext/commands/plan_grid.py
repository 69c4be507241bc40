"""``plan`` without ``--pp``: the search over parallel sizes, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..plan import collectives
from ..plan.collectives import Links, Overlap
from ..plan.divisions import RULES, divisions, undivided
from ..plan.flags import job_of
from ..plan.gpu import Gpu
from ..plan.grid import Case, Grid, GridResult, Placed, text, variants
from ..plan.model import Job, PlanError
from ..plan.space import SearchSpace
from ..schedule.costs import number_to_json
from ..view.table import columns
from . import plan_space
from .common import positive
from .plan_report import (
    ROW_HEADS,
    chosen_text,
    gib,
    nothing_fits_text,
    point_cells,
    point_json,
    report_json,
)


def add_options(group: argparse._ArgumentGroup) -> None:
    """The options of this search."""
    group.add_argument(
        "--grid", action="store_true", help="with --pp, search the other parallel sizes too; "
        "without --pp they always are"
    )  # fmt: skip
    group.add_argument(
        "--gpus-per-node", type=positive, metavar="N", help="devices that the peer link "
        "connects: the most tensor-parallel ranks; more data- or expert-parallel ranks use the "
        "network too (default 8; GB200 and GB300 72)"
    )  # fmt: skip


def wanted(args: argparse.Namespace, given: dict[str, Any]) -> bool:
    """True if parallel sizes are to be searched."""
    alone = given.get("pipeline_model_parallel_size") is None and bool(given.get("world_size"))
    return alone or args.grid


def search(
    args: argparse.Namespace,
    given: dict[str, Any],
    gpu: Gpu,
    budgets: tuple[int, int | None],
    progress: Callable[[str], None],
) -> GridResult:
    """Run it.

    Args:
        given: Megatron's arguments by name.
        budgets: bytes of a rank on the device, and on the host.
        progress: called with a line now and then.

    Raises:
        PlanError: what was given is of one division, or there is none.
    """
    for value, flag in ((args.microbatches, "--microbatches"), (args.profile, "--profile")):
        if value:
            raise PlanError(
                f"{flag} is of one division: give the parallel sizes and --pp beside it"
            )
    # As with a sharded vocabulary: only where it is asked for.
    given = {"overlap_moe_expert_parallel_comm": False, **given}
    sizes = plan_space.numbers(args.micro_batch_sizes, "--micro-batch-sizes") or tuple(
        sorted({1, 2, 4, given.get("micro_batch_size", 1)})
    )
    one_size = argparse.Namespace(**{**vars(args), "micro_batch_sizes": None})

    def space_of(job: Job) -> SearchSpace:
        return replace(
            plan_space.space(one_size, job, gpu),
            micro_batch_sizes=(job.micro_batch_size,),
            cheap_recompute=(job.cheap_recompute,),
            vocabulary=False,  # closed forms of what it gains are not there yet
        )

    cheap = plan_space.recompute(args, job_of(undivided(given)))
    full = given.get("recompute_granularity") is None and args.cheap_recompute != "on"
    overlap = Overlap(
        bool(given.get("overlap_grad_reduce")), bool(given.get("overlap_param_gather"))
    )
    return Grid(
        divisions(given, gpu.devices_per_node),
        space_of,
        lambda job: variants(job, sizes, cheap, full=full),
        Links(gpu, gpu.devices_per_node),
        *budgets,
        args.effort,
        overlap,
        progress,
    ).run()


def grid_json(
    result: GridResult,
    ignored: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    file: str | None,
    node: int | None,
) -> dict[str, Any]:
    """``report_json`` of the best division, with the front of all of them."""
    best = result.best
    shown = best or result.smallest
    space, found = result.search_of(shown)
    data = report_json(found, space, ignored, notes, seconds, file, node)
    data["front"] = [_placed(point_json(one.point), one) for one in result.front]
    if best is None:
        data["needs"] = _with_flags(data["needs"], shown)
    else:
        data["chosen"] = _with_flags(data["chosen"], shown)
    data["simulated"] = len(result.points)
    data["candidates"] = sum(each.candidates for _, each in result.searches)
    data["skipped"] = 0
    data["grid"] = {
        "world_size": _world(shown.job),
        "divisions": result.divisions,
        "cases": result.cases,
        "pruned": result.pruned,
        "searched": result.searched,
        "skipped": result.skipped,
        "without_pipeline": None if result.alone is None else _alone(result.alone),
    }
    beside = [each for each in data["assumptions"] if not each.startswith("not in a step's time")]
    data["assumptions"] = [
        *beside,
        *collectives.ASSUMPTIONS,
        f"divisions: {RULES}",
    ]
    return data


def _world(job: Job) -> int:
    return (
        job.tensor_model_parallel_size
        * job.pipeline_model_parallel_size
        * job.context_parallel_size
        * job.data_parallel_size
    )


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


def _placed(data: dict[str, Any], one: Placed) -> dict[str, Any]:
    seconds = float(one.iteration_us) / 1e6
    batch = one.job.global_batch_size or 0
    return {
        **data,
        "division": division_json(one.job),
        "recompute": one.job.recompute_granularity,
        "iteration_ms": number_to_json(one.iteration_us / 1000),
        "data_parallel_ms": one.overhead.data * 1e3,
        "context_parallel_ms": one.overhead.context * 1e3,
        "optimizer_ms": one.overhead.optimizer * 1e3,
        "samples_per_second": batch / seconds,
    }


def _with_flags(data: dict[str, Any], one: Placed) -> dict[str, Any]:
    return {**_placed(data, one), "flags": [*division_flags(one.job), *data["flags"]]}


def division_flags(job: Job) -> list[str]:
    """Megatron's flags of the division, and of full recompute."""
    tp, cp = job.tensor_model_parallel_size, job.context_parallel_size
    words = [f"--tensor-model-parallel-size {tp}"]
    words += ["--sequence-parallel"] if job.sequence_parallel else []
    words += [f"--context-parallel-size {cp}"] if cp > 1 else []
    if job.num_experts:
        words += [f"--expert-model-parallel-size {job.expert_model_parallel_size}"]
        words += [f"--expert-tensor-parallel-size {job.expert_tensor_parallel_size}"]
    words += ["--use-distributed-optimizer"] if job.use_distributed_optimizer else []
    if job.recompute_granularity == "full":
        words += [
            f"--recompute-granularity full --recompute-method {job.recompute_method} "
            f"--recompute-num-layers {job.recompute_num_layers}"
        ]
    return words


def _alone(case: Case) -> dict[str, Any]:
    return {
        "division": division_json(case.job),
        "micro_batch_size": case.job.micro_batch_size,
        "iteration_ms": case.likely_us / 1000,
        "bytes": case.least,
        "text": f"{text(case.job)}, microbatches of {case.job.micro_batch_size}",
    }


def grid_text(data: dict[str, Any], file: str | None, beside: Sequence[str]) -> str:
    """``grid_json``'s answer for people; ``beside``: Megatron's own at its parallel sizes."""
    grid = data["grid"]
    lines = [
        f"{grid['world_size']} x {data['gpu']}, {gib(data['memory_cap_bytes'])} a rank; "
        f"{grid['divisions']} divisions, with microbatch sizes and recompute {grid['cases']} "
        f"cases: {grid['pruned']} ruled out by closed forms, {grid['searched']} searched, "
        f"{grid['skipped']} left out (unlikely, or no passes left); "
        f"{data['simulated']} points simulated in {data['seconds']:.1f} s",
        "",
    ]
    if data["chosen"] is None:
        lines += nothing_fits_text(data)
    else:
        rows = [
            (*_division_cells(point), *point_cells(point), f"{point['iteration_ms']:.1f}")
            for point in data["front"]
        ]
        lines += [
            "Pareto-optimal in time of an iteration, device and host memory, of those that fit:"
        ]
        lines += columns([(*_SIZES, *ROW_HEADS, "iteration ms"), *rows])
        best = data["chosen"]
        extra = ("data_parallel_ms", "context_parallel_ms", "optimizer_ms")
        lines += [
            "",
            "an iteration of the fastest: {:.1f} ms of passes, {:.1f} of data-parallel exchange, "
            "{:.1f} of context-parallel exchange, {:.1f} of the optimizer; {:.3g} samples/s".format(
                best["step_ms"], *(best[each] for each in extra), best["samples_per_second"]
            ),
            "",
            *chosen_text(data, file),
        ]
    alone = grid["without_pipeline"]
    if alone is not None:
        cost = f"{alone['iteration_ms']:.1f} ms an iteration, {gib(alone['bytes'])}"
        lines += ["", f"without a pipeline, on stock Megatron: {alone['text']}: {cost}"]
    if beside:
        lines += ["", "at these parallel sizes, a step's passes:", *beside]
    if data["ignored"]:
        lines += ["", "ignored flags: " + " ".join(data["ignored"])]
    return "\n".join(lines)


_SIZES = ("TP", "PP", "DP", "CP", "EP")


def _division_cells(point: dict[str, Any]) -> tuple[str, ...]:
    sizes = point["division"]
    return tuple(str(sizes[n]) for n in ("tensor", "pipeline", "data", "context", "expert"))
