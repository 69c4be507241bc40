"""Our command-line flags, on Megatron's own parser."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Mapping, Sequence

from .._input import attribute
from ..schedule import generators
from ..schedule.generators.registry import takers
from .arguments import MegatronArgs
from .errors import ConfigError
from .features.moe import flags as moe_flags
from .features.post_validation.setup import PATIENCE

GROUP = "pipeline schedules (megatron_ext)"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group; all defaults leave Megatron as it is."""
    group = parser.add_argument_group(title=GROUP)
    capped, grouped = (" and ".join(takers(f"takes_{o}")) for o in ("memory_cap", "group_size"))
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
        help=f"cap of {capped} and auto, as a fraction of 1F1B's peak activation, e.g. 0.6, or as "
        "all bytes of a rank, e.g. 40GiB; auto's default is 1. With offload, of every schedule: "
        "what stays on the device",
    )
    group.add_argument(
        "--pp-group-size",
        type=int,
        metavar="G",
        default=None,
        help=f"group size of {grouped}, from half the pipeline size to all of it",
    )
    group.add_argument(
        "--pp-cost",
        metavar="F,B,W[,HOP]",
        default=None,
        help="times of one microbatch on one rank, in any unit, that shape the order; default: "
        "equal, no hop",
    )
    group.add_argument(
        "--pp-profile-steps",
        type=int,
        metavar="N",
        default=None,
        help="measure F, B, W of every stage and the hop for N steps, then make the order anew for "
        "them, if that is faster",
    )
    group.add_argument(
        "--pp-profile",
        metavar="FILE",
        default=None,
        help="with --pp-profile-steps: write there what was measured, for `megatron-ext plan "
        "--profile` and later runs; without: plan with what a former run wrote, from the first "
        "step on",
    )
    group.add_argument(
        "--pp-trace",
        metavar="DIR",
        default=None,
        help="write each rank's measured timeline and peak resident activation sets here",
    )
    group.add_argument(
        "--pp-post-validation",
        type=int,
        nargs="?",
        const=PATIENCE,
        default=None,
        metavar="N",
        help="step the optimizer, and begin the next iteration, before the gradient norm of all "
        "pipeline ranks is known, and undo that where it was wrong; from the (N+1)th iteration in "
        f"a row on whose gradients need no clipping (default {PATIENCE})",
    )
    group.add_argument(
        "--pp-cheap-recompute",
        action="store_true",
        default=None,
        help="recompute norm and activation-function outputs in backward instead of keeping them, "
        "beside what --recompute-modules names",
    )
    _add_offload_arguments(group)
    moe_flags.add_arguments(group)
    return parser


def _add_offload_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pp-offload",
        metavar="{off,half,full,auto}",
        default=None,
        help="send activations to the host's memory between their forward and backward pass: of "
        "half of each rank's model chunks (rounded up), of all, or (auto) what lowers the peak "
        "most while no pass waits",
    )
    group.add_argument(
        "--pp-offload-chunks",
        type=int,
        metavar="N",
        default=None,
        help="offload N chunks of each rank, those with the longest lifespan; in place of "
        "--pp-offload",
    )
    group.add_argument(
        "--pp-offload-time",
        metavar="T[,T2]",
        default=None,
        help="time that one activation set takes to the host, and back, as a fraction of its "
        "chunk's F+B+W; default: measured in the first step",
    )
    group.add_argument(
        "--pp-offload-transfer",
        metavar="{single,dual,paired}",
        default=None,
        help="one copy stream, one a direction, or neighbours that share a switch taking turns; "
        "default: measured at start",
    )


_FLAGS = (
    "--pp-schedule",
    "--pp-memory-cap",
    "--pp-group-size",
    "--pp-cost",
    "--pp-profile-steps",
    "--pp-profile",
    "--pp-trace",
    "--pp-post-validation",
    "--pp-offload",
    "--pp-offload-chunks",
    "--pp-offload-time",
    "--pp-offload-transfer",
    "--pp-cheap-recompute",
    *moe_flags.FLAGS,
)
_SWITCHES = ("pp_cheap_recompute",)


def wanted(argv: Sequence[str]) -> bool:
    """True if a command line uses one of our flags or asks for help, so that we must hook in."""
    return bool(_names(argv) & {*_FLAGS, "-h", "--help"})


def lost_in_yaml(argv: Sequence[str], config: Mapping[str, str]) -> str | None:
    """The first of our flags, on ``argv`` or in ``config``, that a ``--yaml-cfg`` there drops."""
    given = _names(argv)
    if "--yaml-cfg" not in given:
        return None
    return next((f for f in _FLAGS if f in given or attribute(f) in config), None)


def _names(argv: Sequence[str]) -> set[str]:
    return {argument.split("=", 1)[0] for argument in argv}


def defaults(config: Mapping[str, object]) -> dict[str, str]:
    """``{"pp_schedule": "v-half", ...}`` as defaults of the flags; None leaves one out.

    Raises:
        ConfigError: a name that no flag has, or a switch that is neither True nor False.
    """
    known = [attribute(flag) for flag in _FLAGS]
    for name in config:
        if name not in known:
            raise ConfigError(f"{name!r} is no option of megatron_ext; it has {', '.join(known)}")
        if name in _SWITCHES and config[name] not in (None, True, False):
            raise ConfigError(f"{name} is a switch, True or False, but got {config[name]!r}")
    # As text: argparse converts and checks a default that is text, as it does the user's.
    given = {name: value for name, value in config.items() if value is not None}
    return {n: str(v) for n, v in given.items() if not (n in _SWITCHES and v is False)}


def options_without_schedule(args: MegatronArgs) -> list[str]:
    """Our flags that were given although ``--pp-schedule``, which they belong to, was not."""
    belonging = [flag for flag in _FLAGS[1:] if flag not in moe_flags.FLAGS]
    return [flag for flag in belonging if getattr(args, attribute(flag), None) is not None]


def given(args: MegatronArgs) -> dict[str, str]:
    """Our flags that are in use, with their values as text."""
    values = {flag: getattr(args, attribute(flag), None) for flag in _FLAGS}
    return {flag: str(value) for flag, value in values.items() if value is not None}


def given_to_megatron(args: MegatronArgs, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Megatron's own options, and the training script's, whose values are not their defaults.

    What every rank may have of its own is left out: its number, and where on its node something
    lies, of which only counts that it was given.

    Args:
        args: as parsed, not yet validated.
        parser: that has parsed them.
    """
    ours = {attribute(flag) for flag in _FLAGS}
    found = {}
    for option in parser._actions:
        if option.dest in (*ours, "local_rank") or not hasattr(args, option.dest):
            continue
        value = getattr(args, option.dest)
        # Of a switch and its opposite, the one that sets this value.
        sets_it = option.nargs != 0 or option.const in (value, None)
        text = "given" if option.nargs == 0 and option.const is not None else _text(value)
        if value != parser.get_default(option.dest) and sets_it and text is not None:
            found[(option.option_strings or [option.dest])[0]] = text
    return found


def _text(value: object) -> str | None:
    """A value that was given on a command line; None if it is something else."""
    if isinstance(value, (list, tuple)):
        parts = [_text(part) for part in value]
        return " ".join(part for part in parts if part is not None)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return "a path" if os.sep in value else value
    return str(value) if value is None or isinstance(value, (bool, int, float)) else None
