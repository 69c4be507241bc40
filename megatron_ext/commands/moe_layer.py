"""``simulate --moe``: one MoE layer's streams, forward and backward."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .._input import attribute, flag_of
from ..plan import moe_job
from ..plan.flags import add_flags, job_of
from ..plan.gpu import GPUS, gpu_of
from ..plan.model import PlanError
from ..plan.moe_layer import GivenCosts, scaled
from ..plan.moe_times import allowed_plans, job_costs
from ..plan.times import price_of
from .common import InputError, Options, Parser, output, positive, refuse_others, user_input
from .moe_report import RENDERERS, Layer, drawn, picture_of, report_json, report_text
from .plan_device import EXCHANGE_RATE, exchange_rates
from .plan_input import FORMS, from_line, read_command

_COSTS = ("exchange", "experts", "input", "inside", "again", "latency", "launch")
_MOE = tuple(map(attribute, (moe_job.CHUNKS, moe_job.REUSE, moe_job.BUDGET)))


def declare_layer(parser: Parser) -> None:
    """Options of ``simulate --moe``; Megatron's flags are not listed."""
    group = parser.add_argument_group(
        "one MoE layer in place of a schedule",
        "--moe-pipeline-chunks and --moe-memory-reuse as in training, model and division as "
        "Megatron's own flags; what is left open is compared, and the fastest drawn",
    )
    for table in (_LAYER, EXCHANGE_RATE, _DRAWN):
        table.declare(parser, group)
    add_flags(group)
    names = [action.dest for action in group._group_actions if action.dest != "moe"]
    parser.needs |= dict.fromkeys(names, "--moe")
    parser.set_defaults(of_layer=names)


_LAYER = Options(
    {
        "--moe": "draw the streams of one MoE layer",
        "--from-args LINE|FILE": FORMS,
        "--gpu GPU": f"{', '.join(GPUS)} (default H100)",
        "--gpus-per-node N": "devices that the peer link connects; all-to-alls of more "
        "expert-parallel ranks use the network too (default 8; GB200 and GB300 72)",
    },
    kinds={"--gpus-per-node": positive, "--from-args": read_command},
)
_DRAWN = Options(
    {
        "--moe-cost KEY=T,...": f"times of a call: {', '.join(_COSTS)} (the last two per "
        "operation); in ms, they replace the model's; without a model, any unit (give exchange "
        "and experts)",
        "--lookahead N": "number of dispatches before the first combine",
        "--split-backward": "leave weight gradients to W passes, as zero-bubble schedules do; "
        "with none",
        "--output PATH": f"write {', '.join(RENDERERS)} (.json: Chrome trace)",
        "--width COLUMNS": "width of the text (default 120)",
    },
    kinds={"--lookahead": positive, "--width": int},
)


def simulate_layer(args: argparse.Namespace) -> None:
    """Run ``simulate --moe``."""
    refuse_others(args, "--moe", ("moe", "queue", "json", *args.of_layer))
    suffix = None if args.output is None else Path(args.output).suffix
    if suffix is not None and suffix not in RENDERERS:
        raise InputError(f"--output {args.output}: use {', '.join(RENDERERS)}")
    with user_input():
        layer = _layer(args)
    if args.lookahead is not None:
        plans = [one._replace(lookahead=args.lookahead) for one in layer.plans]
        layer = layer._replace(plans=plans)
    runs, chosen = layer.runs(args.split_backward)
    picture = picture_of(layer, chosen)
    if suffix is not None:
        with output(args.output) as path:
            Path(path).write_text(RENDERERS[suffix](picture), encoding="utf-8")
    data = report_json(layer, runs, chosen)
    if args.json:
        print(json.dumps(data))
        return
    print(report_text(data))
    print(f"{args.output}: {picture.title}\n" if suffix else drawn(picture, args.width), end="")


def _layer(args: argparse.Namespace) -> Layer:
    given, ignored = from_line(args)
    times, queue = _times(args.moe_cost), args.queue == 1
    if not set(given) - set(_MOE):
        return _without_model(args, given, times, queue)
    job, gpu = job_of(given), gpu_of(args.gpu or "H100").with_(**exchange_rates(args))
    if not moe_job.has_experts(job):
        raise PlanError("--moe is for MoE layers, and the model has none; give --num-experts too")
    costs = scaled(job_costs(job, gpu, price_of(job, gpu)), 1e3)
    if times:
        costs = GivenCosts(**times, base=costs)
    return Layer(costs, allowed_plans(job), "ms", queue, job, gpu, ignored)


def _without_model(
    args: argparse.Namespace, given: dict[str, Any], times: dict[str, Any], queue: bool
) -> Layer:
    missing = [key for key in ("exchange", "experts") if key not in times]
    if missing:
        raise PlanError(
            "--moe needs a model as Megatron's flags (--num-layers, --hidden-size, ...), or "
            f"--moe-cost with {' and '.join(missing)} too"
        )
    for name in ("gpu", "gpus_per_node", "exchange_bandwidth"):
        if getattr(args, name) is not None:
            raise PlanError(f"{flag_of(name)} is for a model; give its flags too, or drop it")
    chunks, strategy, budget = (given.get(name) for name in _MOE)
    moe_job.check_flags(chunks, strategy, budget)
    if budget is not None:
        raise PlanError(f"{moe_job.BUDGET} {budget} needs a model, whose bytes it limits")
    return Layer(GivenCosts(**times), moe_job.open_plans(chunks, strategy), "", queue)


def _times(text: str | None) -> dict[str, Any]:
    """``--moe-cost``."""
    found: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1
        if key not in _COSTS or not 0 <= number < float("inf"):
            raise PlanError(
                f"--moe-cost must be KEY=T with times >= 0, keys {', '.join(_COSTS)}; got {part!r}"
            )
        found[key] = number
    return found
