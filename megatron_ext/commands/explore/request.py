"""One set of the page's options, which are those of ``compare``, and what a schedule gives then."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any, NoReturn

from ..._input import shown
from ...schedule import GENERATORS, Schedule
from ...schedule.costs import number_to_json
from ...schedule.memory_cap import ShareCap
from ..common import InputError, offloads, refuse_large
from ..compare import declare_all
from ..compared import asked_of, fitted, refuse_sizes
from ..numbers import Shown, json_of
from ..parser import Parser
from ..quality import jitter_of, simulated
from ..results import network_of
from .model import Model

MOST_PASSES = 1 << 15  # of one chunk a rank: microbatches times ranks


class _Options(Parser):
    """The options of ``compare``, whose errors are messages to the page."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(options: str, model: Model | None = None) -> argparse.Namespace:
    """The options in a text, as on a command line; with a model, those beside it.

    Raises:
        InputError: they are wrong for every schedule, or for more passes than the page takes.
    """
    parser = _Options(prog="explore", add_help=False)
    declare_all(parser)
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise InputError(f"{shown(options)}: {error}") from None
    args = parser.parse_args(words)
    refuse_sizes(args)
    if model is not None:
        model.refuse(args)
        if args.offload not in (None, "off"):
            args.offload_time = args.offload_time or "1"  # until a schedule's own is known
    for read in (asked_of, network_of, jitter_of):
        read(args)  # refuses what is wrong for every schedule
    if args.pp * args.microbatches > MOST_PASSES:
        raise InputError(
            f"--pp {args.pp} times --microbatches {args.microbatches} is more than this page "
            f"takes, {MOST_PASSES}; use megatron-ext compare"
        )
    return args


def result(
    args: argparse.Namespace, name: str, file: Schedule | None, model: Model | None = None
) -> Shown:
    """What a schedule gives: a generated one, or one in a file.

    Raises:
        ValueError, OverflowError, InputError: it does not exist for these sizes.
    """
    over_cap, workload = False, None
    schedule = file
    if model is not None:
        placement = model.placement(args, name, file)
        args = argparse.Namespace(**vars(args))
        args.microbatches = args.microbatches if file is None else file.microbatches
        workload = model.workload(args, placement)
        model.asked(args, workload, placement)
        schedule = None if file is None else replace(file, costs=workload.costs)
    if schedule is None:
        found, over_cap = fitted(asked_of(args), name)
        schedule = found.schedule
    refuse_large(schedule)
    run, quality = simulated(schedule, args, network_of(args), jitter_of(args))
    shown = Shown(run, quality, offloads=offloads(args), over_cap=over_cap, name=name)
    if model is None or workload is None:
        return shown
    ranks = workload.ranks(schedule)
    over_cap = over_cap or max(rank.total for rank in ranks) > model.budget_bytes
    return replace(shown, over_cap=over_cap, ranks=ranks)


def row(found: Shown) -> dict[str, Any]:
    """A schedule's numbers: those of ``simulate --json``, and its place beside the cap; with a
    model also in ms and GiB."""
    peak = number_to_json(found.peak)
    return {**json_of(found), "peak": peak}


def cap_of(args: argparse.Namespace) -> float | None:
    """The cap in microbatches; None: there is none."""
    cap = asked_of(args).cap
    return float(cap.share) * args.pp if isinstance(cap, ShareCap) else None


def slowness(name: str) -> tuple[bool, bool]:
    """Sorts generated schedules: searches for a cap take longest, then those of V placement."""
    made = GENERATORS[name]
    return made.takes_memory_cap, made.placement == "vee"
