"""``plan``: from a model, a device and a memory budget to flags."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..plan.search import search
from . import plan_device, plan_input, plan_space, training_command
from .common import JSON, InputError, Options, Parser, user_input
from .plan_baseline import baselines, baselines_json
from .plan_given import Given, difference, freed, jobs, replaced
from .plan_report import report_json
from .plan_table import answer, save_order

_HELP = """
The model and how it is divided are given as Megatron's own flags, as pretrain_gpt.py has them
(--num-layers, --hidden-size, --num-attention-heads, --seq-length, --swiglu, --num-experts,
--multi-latent-attention, --mtp-num-layers, --tensor-model-parallel-size,
--world-size, --global-batch-size, --use-distributed-optimizer, --optimizer, --bf16, --fp8-format,
--fp8-param-gather, --recompute-activations, ...), or as the command itself after --, or
with --from-args as a line of flags, or with --hf-config as a file. Without
--pp, --world-size is searched for all parallel sizes that are not given.
"""


def declare(parser: Parser) -> None:
    parser.description = _HELP
    plan_input.declare(parser)
    plan_device.declare(parser)
    plan_space.declare(parser)
    _OWN.declare(parser)
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
    args.from_args = training_command.command_of(args)
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
            alone = not args.schedules  # else a pipeline is asked for
            seeds = others.seeds(spaces, alone=alone)
            result = search(spaces, *budgets, progress, seeds, others.families, alone=alone)
    best = result.best
    notes = [*notes, *spaces[0].job.assumptions]
    seconds = time.perf_counter() - started
    if args.output is not None and best is not None:
        save_order(args.output, best)
    data = report_json(result, spaces, ignored, notes, seconds, args.output)
    data["model_flags"] = plan_input.model_flags(args, given)
    data |= baselines_json(others, result, gpu)
    flags = (data["chosen"] or data["needs"])["flags"]
    data["replaced_flags"] = replaced(args, given, flags)
    data["difference"] = difference(args, given, flags)
    if args.json:
        print(json.dumps(data))
    else:
        print(answer(data, every=args.verbose))
    return 0 if best is not None else 1


def _check(args: argparse.Namespace) -> None:
    if args.output is not None and not args.output.endswith(".json"):
        raise InputError(f"--output {args.output}: a schedule file's name ends in .json")
