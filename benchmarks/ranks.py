"""Forks the ranks of a benchmark, once torch and what else it needs are imported."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable


def on_ranks(count: int, task: Callable[[int], None]) -> bool:
    """Run ``task(rank)`` in a process of its own for each rank; true if all ended well.

    The first one that fails ends the others.
    """
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                task(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
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
