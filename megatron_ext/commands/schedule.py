"""``schedule``: write a schedule file."""

from __future__ import annotations

import argparse
import json
import time

from .._terminal import Progress
from ..schedule import lower, save
from ..schedule.generators import steadier
from .blocks import block_schedule
from .common import (
    JSON,
    InputError,
    Options,
    Parser,
    hint,
    offloads,
    output,
    schedule_of,
)
from .numbers import Shown, json_of, short
from .options import JITTER, block, declare_schedule
from .quality import jitter_of, simulated


def declare(parser: Parser) -> None:
    declare_schedule(parser)
    parser.declare("robustness", JITTER)
    block("the schedule of a building block, squeezed and reordered").declare(parser)
    _OWN.declare(parser)
    parser.set_defaults(run=_write_schedule)


_OWN = Options(
    {
        "--output FILE": "FILE.json, or FILE.csv for torch.distributed.pipelining's form (compute "
        "actions, no costs)",
        "--lowered": "include the transfers between ranks and to the host",
        **JSON.help,
    },
    required=("--output",),
)


def _write_schedule(args: argparse.Namespace) -> None:
    if offloads(args) and not args.lowered:
        raise InputError(
            f"--offload {args.offload} needs --lowered too: without it the file holds compute "
            "actions only"
        )
    if not args.output.endswith((".json", ".csv")):
        raise InputError(f"--output {args.output}: the suffix gives the form; use .json or .csv")
    if args.lowered and args.output.endswith(".csv"):
        raise InputError(
            f"--output {args.output}: torch's CSV compute form has no transfers; "
            "leave --lowered out, or write a .json"
        )
    if (args.schedule is None) == (args.block is None):
        raise InputError("give either --schedule NAME or --block NAME, or a file of either")
    noise = jitter_of(args)
    started = time.perf_counter()
    with Progress("schedule") as progress:
        progress(f"making {args.schedule or args.block}")
        schedule = schedule_of(args) if args.block is None else block_schedule(args)
        before = schedule
        if noise is not None and args.objective in (None, "makespan"):
            progress(f"comparing orders of {schedule.name} under jitter")
            schedule = steadier(schedule, noise.spread, args.effort)
        mean = None if noise is None or schedule is before else noise.of(before, None).mean
        schedule = lower(schedule) if args.lowered else schedule.compute()
    taken = time.perf_counter() - started
    with output(args.output) as path:
        save(schedule, path)
    if args.json:
        simulation, quality = simulated(schedule, args, None, noise)
        data = json_of(Shown(simulation, quality, taken, offloads(args)))
        data |= {"output": args.output}
        if mean is not None:
            after = data["makespan_quantiles"]["mean"]
            data["steadier"] = {"before": float(mean), "after": after}
        print(json.dumps(data))
        return
    actions = sum(len(row) for row in schedule.ranks)
    print(f"{args.output}: {schedule.name}, pp {schedule.pp}, {actions} actions")
    order = "" if schedule.arrangement is None else f"microbatches {schedule.arrangement}"
    for note in (schedule.note, order, hint(args)):
        if note:
            print(f"  {note}")
    if noise is not None:
        found = "no steadier order found" if mean is None else f"mean {short(mean)} before"
        print(f"  jitter: {found}; {noise.text(noise.of(schedule, None))}")
