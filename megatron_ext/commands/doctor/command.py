"""Findings of ``doctor`` about a training command: its sizes as read, its flags, its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ... import _megatron_flags
from ..._input import meant
from .findings import OK, WARNING, Finding

if TYPE_CHECKING:
    from ...prove.sources import Command

_LISTED = 5  # flags in a line


def diagnose_command(command: Command, devices: int) -> Iterator[Finding]:
    """What the command asks for.

    Args:
        command: as ``--from-args`` was read.
        devices: GPUs of this machine; 0: none, or not known.
    """
    from ...prove.flags import Flags
    from ...prove.shrink import given_sizes
    from ...prove.sources import launched

    command = launched(command)
    flags = Flags(command.flags)
    yield Finding("command", OK, given_sizes(flags, command.world).removeprefix("given: "))
    for note in command.notes:
        yield Finding("command", OK, f"assumed: {note}")
    known = _megatron_flags.names()
    unknown = [name for name in flags.names if not _megatron_flags.kind_of(name)]
    if unknown and command.other:  # fields of a recipe
        text = f"{len(flags.names) - len(unknown)} known, {len(unknown)} fields have none"
        yield Finding("flags", OK, text)
    elif unknown:
        guesses = [f"{name}{meant(name, known, 0.8)}" for name in unknown[:_LISTED]]
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        yield Finding(
            *("flags", WARNING, f"no supported Megatron has {', '.join(guesses)}{more}"),
            "correct the name, or use the script that has it",
        )
    else:
        yield Finding("flags", OK, f"{len(flags.names)}, all known")
    if devices and command.world and command.world % devices and command.world > devices:
        text = f"{command.world} ranks, but {devices} devices here"
        yield Finding("ranks", WARNING, text, f"start a multiple of {devices} ranks")
    elif devices and command.world:
        machines = -(-command.world // devices)
        plural = "s" if machines > 1 else ""
        text = f"{command.world}: {machines} machine{plural} with {devices} devices"
        yield Finding("ranks", OK, text)
