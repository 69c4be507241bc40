"""Runs a function on forked ranks, so that torch and Megatron are imported once."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def on_ranks(count: int, task: Callable[[int], None]) -> bool:
    """Run ``task(rank)`` in a process of its own for each rank; true if all ended well.

    The first one that fails ends the others.
    """
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            run_and_leave(functools.partial(task, rank))
        children.append(pid)
    good = True
    while children:
        pid, status = os.waitpid(-1, 0)
        if pid not in children:
            continue
        children.remove(pid)
        if status != 0 and good:
            good = False
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return good


def run_and_leave(task: Callable[[], None]) -> NoReturn:
    """Run ``task`` in a forked process and end it; the exit status is 1 if it raised."""
    status = 1
    try:
        task()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
