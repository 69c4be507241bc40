"""Host memory of all ranks of a host, for the features that pin some."""

from __future__ import annotations

import socket

from ..offload.arena import pinned_bytes
from ..offload.host import OFFLOAD, USABLE_FRACTION, Purpose, require_host_memory
from ..offload.host_memory import available_host_bytes
from .errors import ConfigError
from .utils import gather


def require_memory_on_hosts(
    needed_bytes: int, held_bytes: int = 0, purpose: Purpose = OFFLOAD
) -> None:
    """Check, with all ranks of the job, that their arenas fit into their hosts' memory.

    What other arenas have is not available any more, so the needs of several features add up. No
    rank allocates before all ranks have looked, and the last one to look sees all that is there.

    Args:
        held_bytes: of an arena of this rank that goes away.

    Raises:
        ConfigError: the ranks of one host, whichever, need too much.
    """
    other = pinned_bytes() - held_bytes
    every = gather((socket.gethostname(), needed_bytes, held_bytes, available_host_bytes(), other))
    for host in sorted({entry[0] for entry in every}):
        needs, held, available, others = zip(*(e[1:] for e in every if e[0] == host))
        try:
            require_host_memory(needs, min(available) + sum(held), purpose, sum(others))
        except ValueError as error:
            raise ConfigError(f"host {host}: {error}") from None


def usable_bytes_a_rank() -> int:
    """What each rank may still pin if all ranks of its host pin as much: the least of all hosts.

    To be called by all ranks of the job.
    """
    mine = socket.gethostname(), int(available_host_bytes() * USABLE_FRACTION)
    every: list[tuple[str, int]] = gather(mine)
    hosts = [host for host, _ in every]
    return min(usable // hosts.count(host) for host, usable in every)
