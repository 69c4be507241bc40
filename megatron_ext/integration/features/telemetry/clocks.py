"""How far the wall clocks of a pipeline's machines are apart."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

from ...utils import gather

_SAMPLES = 5
# Ranks leave a collective some milliseconds apart, which clocks under NTP do not differ by.
_CERTAIN_SECONDS = 0.02


def seconds_ahead(group: Any) -> float:
    """By how much this machine's wall clock is ahead of that of the pipeline's first rank.

    All ranks of ``group``, the pipeline's, call this together. 0 where it may be due to when they
    left the collectives.
    """
    host = socket.gethostname()
    if len(set(gather(host, group))) == 1:
        return 0.0
    mine = []
    for _ in range(_SAMPLES):
        gather(None, group)  # which all ranks leave at about the same moment
        mine.append(time.time())
    every = gather((host, mine), group)
    first_host, first = every[0]
    if host == first_host:
        return 0.0
    # One number for all ranks of a machine, which have one clock.
    found = statistics.median(
        own - other for name, times in every if name == host for own, other in zip(times, first)
    )
    return found if abs(found) > _CERTAIN_SECONDS else 0.0
