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
        help=f"pipeline schedule: {', '.join(generators.NAMES)}, or a schedule file",
    )
    group.add_argument(
        "--pp-trace",
        metavar="DIR",
        default=None,
        help="write each rank's measured timeline and peak resident activation sets here",
    )
    return parser


def wanted(argv: Sequence[str]) -> bool:
    """True if a command line uses one of our flags or asks for help, so that we must hook in."""
    ours = [a.split("=", 1)[0] for a in argv]
    return any(a.startswith(("--pp-schedule", "--pp-trace")) or a in ("-h", "--help") for a in ours)
