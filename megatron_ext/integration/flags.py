"""Our command-line flags, on Megatron's own parser."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from .._input import flag_of, meant
from ..patching import PREFIXES
from .arguments import MegatronArgs
from .errors import ConfigError
from .feature import Flag
from .features import FEATURES

GROUP = "pipeline schedules (megatron_ext)"
# The one that the others belong to comes first in --help.
FLAGS: tuple[Flag, ...] = tuple(
    sorted(
        (flag for feature in FEATURES for flag in feature.flags),
        key=lambda flag: (flag.alone, flag.attribute != "pp_schedule"),
    )
)
# Flags that are gone since 0.3.0, and values of others.
_REMOVED = frozenset(
    (
        *("--pp-post-validation", "--pp-group-size", "--pp-effort", "--pp-profile"),
        *("--pp-offload-chunks", "--pp-offload-time", "--pp-offload-transfer", "--pp-slice-cut"),
        *("--pp-vocab-chunks", "--moe-pipeline-costs", "--moe-memory-budget"),
        *("--moe-memory-host-budget", "--pp-slices auto"),
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group; all defaults leave Megatron as it is."""
    group = parser.add_argument_group(title=GROUP)
    for flag in FLAGS:
        flag.add_to(group)
    return parser


def wanted(argv: Sequence[str]) -> bool:
    """True if a command line uses one of our flags or asks for help, so that we must hook in.

    Raises:
        ConfigError: a flag is like one of ours, but none.
    """
    names, known = _names(argv), [flag.name for flag in FLAGS]
    words = " ".join(argv).replace("=", " ").split()
    _require_kept(names | {" ".join(pair) for pair in pairwise(words)})
    for name in sorted(n for n in names - {*known} if n.startswith("--")):
        # No flag of Megatron is as like as 0.9 to one of ours.
        hint = meant(name, known, 0.6 if name.startswith(PREFIXES) else 0.9)
        if hint:
            raise ConfigError(f"{name} is not known{hint}")
    return bool(names & {*known, "-h", "--help"})


def _require_kept(used: Iterable[str]) -> None:
    """Refuse flags, with their values or without, that are gone.

    Raises:
        ConfigError: the first one.
    """
    gone = sorted(_REMOVED.intersection(used) - {flag.name for flag in FLAGS})
    if gone:
        raise ConfigError(f"{gone[0]} was removed in 0.3.0, see CHANGELOG")


def short_errors(parser: argparse.ArgumentParser) -> None:
    """Let Megatron's parser end with one sentence, without the usage of all its options."""

    def error(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        known = parser._option_string_actions if message.startswith("unrecognized") else ()
        raise ConfigError(f"{message}{meant(unknown.split('=')[0], known)}")

    setattr(parser, "error", error)  # noqa: B010 - mypy knows it as a method


def lost_in_yaml(argv: Sequence[str], config: Mapping[str, str]) -> str | None:
    """The first of our flags, on ``argv`` or in ``config``, that a ``--yaml-cfg`` there drops."""
    given = _names(argv)
    if "--yaml-cfg" not in given:
        return None
    return next((f.name for f in FLAGS if f.name in given or f.attribute in config), None)


def option(flag: Flag) -> str:
    """The flag's name in ``megatron_ext.enable``."""
    return flag.attribute.removeprefix("pp_")


def parsed(options: Mapping[str, object]) -> argparse.Namespace:
    """The options of ``megatron_ext.enable`` as a command line's: every flag, converted.

    Raises:
        ConfigError: an unknown option, or a value that the flag does not take.
    """
    known = {option(flag): flag.attribute for flag in FLAGS}
    for name in options:
        _require_kept((flag_of(name), flag_of(f"pp_{name}")))
        if name not in known:
            raise ConfigError(f"{name!r} is no option of megatron_ext; it has {', '.join(known)}")
    parser = add_arguments(_Parser(allow_abbrev=False))
    parser.set_defaults(**defaults({known[name]: value for name, value in options.items()}))
    return parser.parse_args([])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


@contextlib.contextmanager
def in_options() -> Iterator[None]:
    """Errors name our options as ``megatron_ext.enable`` does, where there is no command line."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for flag in sorted(FLAGS, key=lambda flag: -len(flag.name)):
            text = text.replace(flag.name, option(flag))
        if text == str(error):
            raise
        raise ConfigError(text) from error.__cause__


def _names(argv: Sequence[str]) -> set[str]:
    return {argument.split("=", 1)[0] for argument in argv}


def defaults(config: Mapping[str, object]) -> dict[str, str]:
    """``{"pp_schedule": "v-half", ...}`` as defaults of the flags; None leaves one out.

    Raises:
        ConfigError: a name that no flag has, or a switch that is neither True nor False.
    """
    known = {flag.attribute: flag for flag in FLAGS}
    found = {}
    for name, value in config.items():
        _require_kept((flag_of(name), f"{flag_of(name)} {value}"))
        if name not in known:
            raise ConfigError(f"{name!r} is no option of megatron_ext; it has {', '.join(known)}")
        switch = known[name].switch
        if switch and value not in (None, True, False):
            raise ConfigError(f"{name} is a switch, True or False, but got {value!r}")
        # As text: argparse converts and checks a default that is text, as it does the user's.
        if value is not None and not (switch and value is False):
            found[name] = str(value)
    return found


def require_rules(args: MegatronArgs, library: bool = False) -> None:
    """Refuse flags of ours by what each of them says of its value and of the others.

    Raises:
        ConfigError: the first rule that is not kept.
    """
    for flag in FLAGS:
        refusal = None if flag.of(args) is None else flag.refusal(args, library)
        if refusal is not None:
            raise ConfigError(refusal)


def given(args: MegatronArgs, compared: bool = False) -> dict[str, str]:
    """Our flags that are in use, with their values as text.

    Args:
        compared: with what must be equal on all ranks in place of the value.
    """
    found = {}
    for flag in FLAGS:
        value = flag.of(args)
        if value is not None:
            convert = flag.compared if compared else None
            found[flag.name] = str(value) if convert is None else convert(str(value), args)
    return found
