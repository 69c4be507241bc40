"""What a process gets back when nothing of ours is in force any more, beside Megatron's symbols."""

from __future__ import annotations

import contextlib

from ..runtime import communicators
from ..runtime.watchdog import close_process_watchdog


def give_back(groups: bool = True) -> None:
    """End what runs beside training, and undo the rest.

    Args:
        groups: end communicators of messages, too, which all ranks of a group do.
    """
    with contextlib.ExitStack() as stack:
        if groups:
            stack.callback(communicators.close)
        stack.callback(close_process_watchdog)
