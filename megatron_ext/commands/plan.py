"""``plan``: from a model, a device and a memory budget to flags."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..plan.search import Search
from . import plan_device, plan_input, plan_lengths, plan_space
from .common import JSON, InputError, Options, Parser, user_input
from .plan_baseline import BESIDE_GIVEN, baselines, baselines_json, of_given_sizes
from .plan_given import Given, difference, freed, jobs, replaced
from .plan_report import report_json
from .plan_table import answer, save_order

_HELP = """
The model and how it is divided are given as Megatron's own flags, as pretrain_gpt.py has them
(--num-layers, --hidden-size, --num-attention-heads, --seq-length, --swiglu, --num-experts,
--multi-latent-attention, --mtp-num-layers, --tensor-model-parallel-size,
--world-size, --global-batch-size, --use-distributed-optimizer, --optimizer, --bf16, --fp8-format,
--fp8-param-gather, --recompute-activations, ...), or with --from-args as a whole command line, or
with --hf-config as a file. Without --pp, --world-size is searched
for all parallel sizes that are not given.
"""


def declare(parser: Parser) -> None:
    parser.description = _HELP
    plan_input.declare(parser)
    plan_device.declare(parser)
    plan_space.declare(parser)
    for table in (plan_lengths.OPTION, _OWN):
        table.declare(parser)
    parser.set_defaults(run=_plan)


_OWN = Options(
    {
        "--output FILE": "write the chosen schedule to FILE.json",
        "--verbose": "print all assumptions too",
        **JSON.help,
    }
)


def _plan(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with user_input():
        given, ignored, notes = plan_input.given(args)
        gpu = plan_device.gpu(args)
        _check(args)
        own = Given.of(args, given)
        with Progress("plan") as progress:
            asked = jobs(args, freed(args, given), gpu)
            spaces = plan_space.spaces(args, asked, gpu, own)
            budgets = plan_device.budgets(args, gpu)
            others = baselines(args, given, gpu, own, spaces, budgets, progress)
            units, alone = others.units, not args.schedules  # else a pipeline is asked for
            seeds, effort = others.seeds(spaces, alone=alone), args.effort
            slower = plan_space.slower(args)
            if args.grid:
                progress("your sizes")
                seeds = of_given_sizes(args, given, gpu, budgets, seeds, units)
                effort *= BESIDE_GIVEN
            asked_for = spaces, *budgets, effort, progress, seeds, slower, units
            result = Search(*asked_for, alone=alone).run()
    best = result.best
    notes = [*notes, *spaces[0].job.assumptions]
    seconds = time.perf_counter() - started
    if args.output is not None and best is not None:
        save_order(args.output, best)
    data = report_json(result, spaces, ignored, notes, seconds, args.output)
    if args.microbatch_cost is not None:
        with user_input():
            rows = plan_lengths.of_points(args.microbatch_cost, result.front)
        data["lengths"] = [row.json for row in rows]
        data["microbatch_cost"] = args.microbatch_cost
    data["model_flags"] = plan_input.model_flags(args, given)
    data |= baselines_json(others, result, gpu)
    flags = (data["chosen"] or data["needs"])["flags"]
    data["replaced_flags"] = replaced(args, given, flags)
    data["difference"] = difference(args, given, flags)
    if args.json:
        print(json.dumps(data))
    else:
        print(answer(data, args.output, every=args.verbose))
    return 0 if best is not None else 1


def _check(args: argparse.Namespace) -> None:
    if args.effort <= 0:
        raise InputError(f"--effort must be > 0, got {args.effort}")
    if args.output is not None and not args.output.endswith(".json"):
        raise InputError(f"--output {args.output}: a schedule file's name ends in .json")
