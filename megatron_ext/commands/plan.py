"""``plan``: from a model, a device and a memory budget to flags."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from .._terminal import Progress
from ..plan.flags import job_of, notes_on
from ..plan.search import Search
from ..schedule import Schedule, save
from . import plan_device, plan_grid, plan_input, plan_k, plan_space
from .common import InputError, Parser, output, user_input
from .plan_baseline import Given, baselines, beside_text, front_text
from .plan_report import report_json, report_text

_HELP = """
The model and how it is divided are given as Megatron's own flags, as pretrain_gpt.py has them
(--num-layers, --hidden-size, --num-attention-heads, --seq-length, --swiglu, --num-experts,
--multi-latent-attention, --mtp-num-layers, --hybrid-layer-pattern, --tensor-model-parallel-size,
--world-size, --global-batch-size, --use-distributed-optimizer, --optimizer, --bf16, --fp8-format,
--fp8-param-gather, --recompute-activations, ...), or with --from-args as a whole command line, or
with --hf-config, --bridge-config or --checkpoint as a file. Without --pp, --world-size is searched
for all parallel sizes that are not given.
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan", help="find the fastest flags that fit a memory budget", description=_HELP
    )
    plan_input.add_options(parser)
    plan_device.add_options(parser)
    group = plan_space.add_options(parser)
    plan_grid.add_options(group)
    parser.add_argument("--output", metavar="FILE", help="write the chosen schedule to FILE.json")
    parser.add_argument("--verbose", action="store_true", help="print all assumptions too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_plan)
    plan_k.add_tables(parser)


def _plan(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with user_input():
        given, ignored, notes = plan_input.given(args)
        gpu = plan_device.gpu(args)
        budget, host = plan_device.budgets(args, gpu)
        if args.effort <= 0:
            raise InputError(f"--effort must be > 0, got {args.effort}")
        if args.output is not None and not args.output.endswith(".json"):
            raise InputError(f"--output {args.output}: a schedule file's name ends in .json")
        with Progress("plan") as progress:
            progress("searching")
            if plan_grid.wanted(args, given):
                grid = plan_grid.search(args, given, gpu, (budget, host), progress)
                shown = grid.best or grid.smallest
                job = shown.job
                best = None if grid.best is None else grid.best.point
                space, result = grid.search_of(shown)
            else:
                grid, job = None, job_of(given)
                space = plan_space.space(args, job, gpu)
                result = Search(space, budget, host, args.effort, progress).run()
                best = result.best
            progress("comparing with your flags as they are")
            rows = baselines(space, result, Given.of(args, job))
    notes = [*notes, *job.assumptions, *notes_on(ignored)]
    seconds = time.perf_counter() - started
    if args.output is not None and best is not None:
        _save(args.output, best.schedule())
    rest = ignored, notes, seconds, args.output, args.gpus_per_node
    if grid is None:
        data = report_json(result, space, *rest)
    else:
        data = plan_grid.grid_json(grid, *rest)
    data["model_flags"] = plan_input.model_flags(args, given)
    data |= rows
    shown_flags = (data["chosen"] or data["needs"])["flags"]
    data["replaced_flags"] = plan_input.replaced(args, given, shown_flags)
    if args.json:
        print(json.dumps(data))
    else:
        table = front_text(data) if grid is None and best is not None else beside_text(data)
        text = report_text if grid is None else plan_grid.grid_text
        print(text(data, args.output, table), *_assumptions(data, args.verbose), sep="\n")
    return 0 if best is not None else 1


def _assumptions(data: dict[str, Any], every: bool) -> list[str]:
    if not every:
        # What the user's flags lack may change more than any schedule does.
        lacking = [f"assumed: {each}" for each in data["assumptions"] if each.startswith("no --")]
        return ["", *lacking, f"{len(data['assumptions'])} assumptions; --verbose lists them"]
    return ["", "assumptions:", *(f"  {each}" for each in data["assumptions"])]


def _save(path: str, schedule: Schedule) -> None:
    with output(path) as target:
        save(schedule, target)
