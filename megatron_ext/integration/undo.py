"""What a process gets back when nothing of ours is in force any more, beside Megatron's symbols."""

from __future__ import annotations

import contextlib

from ..runtime import communicators
from ..runtime.watchdog import close_process_watchdog


def give_back() -> None:
    """End what runs beside training, with communicators of messages, and undo the rest."""
    with contextlib.ExitStack() as stack:
        stack.callback(communicators.close)
        stack.callback(close_process_watchdog)
