"""``checkpoint``: the iterations in a folder, which are complete, and the layout that saved them.

Runs without torch; nothing of a checkpoint is loaded, made or run.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from .._input import shown, size_text
from ..checkpoints import folder as saved
from ..checkpoints.layout import Layout
from .parser import JSON, InputError, Options, Parser

# Optimizer state in these formats fits every layout.
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
_OPTIMIZER = ("optimizer.", "chained_")


def declare(parser: Parser) -> None:
    parser.description = (
        "Reads names, sizes and descriptions; loads and runs nothing of a checkpoint. Exit status "
        "1 if the iteration that a run would load is incomplete or damaged."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="the folder of --save, or of one iteration "
        "in it"
    )  # fmt: skip
    _OWN.declare(parser)
    parser.set_defaults(run=_checkpoint)


_OWN = Options(
    {"--iteration N": "iteration to report (default: the one to load)", **JSON.help},
    kinds={"--iteration": int},
)


def _checkpoint(args: argparse.Namespace) -> int:
    root, iteration = args.folder, args.iteration
    try:
        found = saved.iterations(root)
    except ValueError as error:
        raise InputError(f"{root} {error}") from None
    if "" in found:
        return _one(root, args.json)
    report: dict[str, Any] = {"folder": str(root), "tracked": None, "tracker_problem": None}
    try:
        report["tracked"] = saved.tracked(root)
        if report["tracked"] is None:
            report["tracker_problem"] = f"{saved.TRACKER} is missing: no save has ended"
    except ValueError as error:
        report["tracker_problem"] = str(error)
    problems = {name: saved.problem(path) for name, path in found.items()}
    complete = [name for name, what in problems.items() if what is None and name != saved.RELEASE]
    report["iterations"] = [
        {"iteration": name, "folder": found[name].name, "problem": what}
        for name, what in problems.items()
    ]
    report["last_whole"] = complete[-1] if complete else None
    wanted = iteration if iteration is not None else report["tracked"]
    if iteration is not None and iteration not in found:
        raise InputError(f"{root} has no iteration {iteration}; it has {_names(found)}")
    report["problem"] = _problem(root, report, problems, wanted)
    look_at = wanted if problems.get(wanted, "") is None else report["last_whole"]
    report["layout"] = _described(found[look_at]) if look_at in found else None
    report["layout_of"] = look_at
    if "error" in (report["layout"] or {}) and report["problem"] is None:
        other = saved.last_complete(found, look_at)
        report["problem"] = f"{_undescribed(look_at, report)}; {saved.advice(root, other)}"
    report["newer"] = saved.newer(root, found, report["tracked"])
    print(json.dumps(report) if args.json else "\n".join(_lines(report)))
    return 0 if report["problem"] is None else 1


def _one(folder: Path, as_json: bool) -> int:
    """An iteration's own folder."""
    what = saved.problem(folder)
    report: dict[str, Any] = {"folder": str(folder), "problem": what}
    report["layout"] = _described(folder) if what is None else None
    if "error" in (report["layout"] or {}):
        report["problem"] = what = _undescribed(folder.name, report)
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{folder}: {what or 'complete'}")
        print("\n".join(_layout_lines(report["layout"])))
    return 0 if what is None else 1


def _problem(
    root: Path, report: dict[str, Any], problems: dict[Any, Any], wanted: Any
) -> str | None:
    """One sentence: why the next run would not load what it should, and what to do."""
    if wanted is None:
        what = report["tracker_problem"]
    elif wanted not in problems:
        what = f"{saved.TRACKER} names {wanted}, which has no folder"
    elif problems[wanted] is not None:
        what = f"iteration {wanted} is incomplete ({problems[wanted]})"
    else:
        return None
    return f"{what}; {saved.advice(root, report['last_whole'])}"


def _undescribed(iteration: Any, report: dict[str, Any]) -> str:
    return f"the description of {iteration} cannot be read ({report['layout']['error']})"


def _described(folder: Path) -> dict[str, Any]:
    """Arguments and contents of an iteration."""
    try:
        state = saved.common(folder)
        held = None if saved.by_rank(folder) else saved.contents(folder)
        args = state["args"]
        layout = None if args is None else Layout.of(args)
    except ValueError as error:
        return {"error": str(error)}

    def given(name: str) -> Any:
        value = getattr(args, name, None)
        return value if isinstance(value, int | float | str | bool) else None

    content = state.get("content_metadata")
    sharding = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if sharding is None and given("ckpt_fully_parallel_save"):
        sharding = "fully_sharded_model_space"
    tensors = {} if held is None else held.tensors
    own = {key: value for key, value in tensors.items() if not key.startswith(_OPTIMIZER)}
    return {
        "format": "torch" if held is None else "torch_dist",
        "layout": None if layout is None else str(layout),
        "layers": None if layout is None else layout.layers,
        "ranks": given("world_size"),
        "schedule": given("pp_schedule"),
        "iteration": state.get("iteration") if isinstance(state.get("iteration"), int) else None,
        "samples": given("consumed_train_samples"),
        "distributed_optimizer": bool(given("use_distributed_optimizer")),
        "optimizer_saved": any(key.startswith(_OPTIMIZER) for key in tensors)
        if held is not None
        else "optimizer" in state,
        "optimizer_format": sharding if isinstance(sharding, str) else None,
        "tensors": len(tensors),
        "parameters": sum(math.prod(shape) for shape, _ in own.values()),
        "dtypes": sorted({dtype for _, dtype in own.values()}),
        "bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
    }


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['folder']}: the next run loads iteration {report['tracked']}"]
    if report["tracked"] is None:
        lines = [f"{report['folder']}: {report['tracker_problem']}"]
    for entry in report["iterations"]:
        lines.append(f"  {entry['folder']}: {entry['problem'] or 'complete'}")
    lines += [report[name] for name in ("problem", "newer") if report[name] is not None]
    if report["layout"] is not None:
        lines.append(f"iteration {report['layout_of']}:")
        lines += _layout_lines(report["layout"])
    return lines


def _layout_lines(layout: dict[str, Any] | None) -> list[str]:
    if layout is None or "error" in layout:
        return []
    ranks = f", {layout['ranks']} ranks in all" if layout["ranks"] else ""
    schedule = f", --pp-schedule {shown(layout['schedule'])}" if layout["schedule"] else ""
    lines = [f"  saved with  {layout['layout'] or 'unknown arguments'}{ranks}{schedule}"]
    if layout["layers"]:
        lines.append(f"  layers      {layout['layers']}")
    lines.append(f"  optimizer   {_optimizer(layout)}")
    if layout["samples"] is not None:
        lines.append(f"  progress    iteration {layout['iteration']}, {layout['samples']} samples")
    if layout["tensors"]:
        lines.append(
            f"  holds       {layout['parameters']:,} parameters ({', '.join(layout['dtypes'])}), "
            f"{layout['tensors']} tensors, {size_text(layout['bytes'])}"
        )
    where = (
        "every layout and schedule of this model"
        if layout["format"] == "torch_dist" and _everywhere(layout)
        else "every layout with --no-load-optim, with its optimizer only the one that saved it"
        if layout["format"] == "torch_dist"
        else "only the layout that saved it (format torch)"
    )
    return [*lines, f"  loads into  {where}"]


def _everywhere(layout: dict[str, Any]) -> bool:
    if not layout["optimizer_saved"] or not layout["distributed_optimizer"]:
        return True
    return layout["optimizer_format"] in RESHARDABLE


def _optimizer(layout: dict[str, Any]) -> str:
    if not layout["optimizer_saved"]:
        return "not saved"
    if not layout["distributed_optimizer"]:
        return "not distributed"
    return f"distributed, in the format {layout['optimizer_format'] or 'unknown'}"


def _names(found: dict[int | str, Path]) -> str:
    names = [str(name) for name in found]
    return ", ".join(names[-5:]) if len(names) <= 5 else f"…, {', '.join(names[-5:])}"
