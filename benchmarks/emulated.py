"""What the benchmarks with emulated passes share: ranks that are forked."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork_ranks(count: int, run: Callable[[int], None]) -> bool:
    """Call ``run(rank)`` in ``count`` processes; true if all of them ended well."""
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(statuses)
