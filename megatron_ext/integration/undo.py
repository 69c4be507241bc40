"""What a process gets back when nothing of ours is in force any more, beside Megatron's symbols."""

from __future__ import annotations

import contextlib
import os

from ..runtime import communicators
from ..runtime.watchdog import close_process_watchdog

_undo = contextlib.ExitStack()


def set_environment(name: str, value: str) -> None:
    """Set a variable that has no value, until everything is reverted."""
    if name in os.environ:
        return
    os.environ[name] = value
    _undo.callback(os.environ.pop, name, None)


def give_back(groups: bool = True) -> None:
    """End what runs beside training, and undo the rest.

    Args:
        groups: end communicators of messages, too, which all ranks of a group do.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_undo.close)
        if groups:
            stack.callback(communicators.close)
        stack.callback(close_process_watchdog)
