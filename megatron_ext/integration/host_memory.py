"""Host memory of all ranks of a host, for the features that pin some.

The ranks of a call agree by a collective. Data replicas on the same host may have other calls, so
none waits for them: what they have promised to take stands in the store of the process group.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ..offload.arena import pinned_bytes
from ..offload.host import require_host_memory
from ..offload.host_memory import available_host_bytes
from .errors import named_errors
from .utils import gather_over


@contextlib.contextmanager
def memory_on_hosts(needed_bytes: int, held_bytes: int, groups: Sequence[Any]) -> Iterator[None]:
    """Around the allocation of an arena: check, with all ranks of a call, that theirs fit into
    their hosts' memory.

    What other arenas have is not available any more, so the needs of several features add up. No
    rank of the call allocates before all have looked. What ranks of other calls are about to
    allocate counts too.

    Args:
        held_bytes: of an arena of this rank that goes away.
        groups: of the call.

    Raises:
        ConfigError: the ranks of one host, whichever, need too much.
    """
    host, grows = socket.gethostname(), needed_bytes - held_bytes
    promised = _add(host, grows)
    try:
        other = pinned_bytes() - held_bytes
        mine = (host, needed_bytes, held_bytes, available_host_bytes(), other, promised)
        _require(gather_over(mine, groups))
        yield
    finally:
        _add(host, -grows)  # it is taken now, so it is not available; or never will be


def _require(every: Sequence[tuple[str, int, int, int, int, int]]) -> None:
    """Raise where a host has too little.

    Args:
        every: of each rank of the call, its host, the bytes that it needs and gives back, what is
            available there, what its other arenas hold, and what all ranks of the host together
            were about to take when this one joined them.
    """
    for host in sorted({entry[0] for entry in every}):
        needs, held, available, others, promised = zip(*(e[1:] for e in every if e[0] == host))
        own = sum(needs) - sum(held)
        # The last of the call to promise has seen all of the call, and those before it.
        elsewhere = max(0, max(promised) - own)
        usable = min(available) + sum(held) - elsewhere
        with named_errors(f"host {host}"):
            require_host_memory(needs, max(0, usable), sum(others) + elsewhere)


def _add(host: str, nbytes: int) -> int:
    """Add to what the ranks of a host are about to take; the sum, with no wait for anybody."""
    store = dist.distributed_c10d._get_default_store()
    return int(dist.PrefixStore("megatron_ext/host_memory", store).add(host, nbytes))
