"""Our command-line flags, on Megatron's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..schedule import generators

GROUP = "pipeline schedules (megatron_ext)"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group; all defaults leave Megatron as it is."""
    group = parser.add_argument_group(title=GROUP)
    group.add_argument(
        "--pp-schedule",
        metavar="NAME|FILE",
        default=None,
        help=f"pipeline schedule: {', '.join(generators.NAMES)}, {generators.AUTO} (the fastest "
        "that fits the cap, decided once for the full batch), or a schedule file",
    )
    group.add_argument(
        "--pp-memory-cap",
        metavar="X",
        default=None,
        help="activation cap of v-cap and auto, as a fraction of 1F1B's peak, e.g. 0.6; auto's "
        "default is 1",
    )
    group.add_argument(
        "--pp-group-size",
        type=int,
        metavar="G",
        default=None,
        help="group size of gis, from half the pipeline size to all of it",
    )
    group.add_argument(
        "--pp-cost",
        metavar="F,B,W[,HOP]",
        default=None,
        help="times of one microbatch on one rank, in any unit, that shape the order; default: "
        "equal, no hop",
    )
    group.add_argument(
        "--pp-trace",
        metavar="DIR",
        default=None,
        help="write each rank's measured timeline and peak resident activation sets here",
    )
    return parser


_FLAGS = ("--pp-schedule", "--pp-memory-cap", "--pp-group-size", "--pp-cost", "--pp-trace")


def wanted(argv: Sequence[str]) -> bool:
    """True if a command line uses one of our flags or asks for help, so that we must hook in."""
    given = {argument.split("=", 1)[0] for argument in argv}
    return not given.isdisjoint({*_FLAGS, "-h", "--help"})


def options_without_schedule(args: argparse.Namespace) -> list[str]:
    """Our flags that were given although ``--pp-schedule``, which they belong to, was not."""
    attributes = ((flag, flag[2:].replace("-", "_")) for flag in _FLAGS[1:])
    return [flag for flag, name in attributes if getattr(args, name, None) is not None]
