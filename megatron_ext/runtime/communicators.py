"""Communicators of our own beside those of a process group: made once, ended with it.

PyTorch knows nothing of them. So ``close`` ends them before ``destroy_process_group``, whose store
their threads use, and a process that ends aborts what is left: NCCL's would warn, and abort while
the interpreter is being taken down.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist


class _Closes(Protocol):
    def close(self, abort: bool = False) -> None:
        """End communicators and threads; ``abort``: without a wait for what is on its way."""


T = TypeVar("T", bound=_Closes)


class PerGroup(Generic[T]):
    """Objects that belong to a process group, by a key; none keeps its group alive."""

    every: Sequence[PerGroup[Any]] = ()

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, T]]
        self._kept = weakref.WeakKeyDictionary()
        PerGroup.every = (*PerGroup.every, self)

    def get(self, group: dist.ProcessGroup, key: Hashable, make: Callable[[], T]) -> T:
        """The one object of ``group`` and ``key``; ``make`` makes it."""
        known = self._kept.setdefault(group, {})
        if key not in known:
            known[key] = make()
        return known[key]

    def close(self, group: dist.ProcessGroup | None, abort: bool) -> set[dist.ProcessGroup]:
        """Close and forget those of ``group``, or of all; the groups that had any."""
        groups = [g for g in self._kept if group is None or g is group]
        for one in groups:
            for held in self._kept.pop(one).values():
                held.close(abort)
        return set(groups)

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> list[dict[Hashable, T]]:
        """What every group has."""
        return list(self._kept.values())


# How often communicators of a group have been closed: new ones must not meet at the old keys.
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def close(group: dist.ProcessGroup | None = None, abort: bool = False) -> None:
    """End our communicators of ``group``, or of all groups; all their ranks do, as for the group.

    Args:
        abort: without a wait for messages that are on their way.
    """
    for one in set[Any]().union(*(kept.close(group, abort) for kept in PerGroup.every)):
        _closed[one] = _closed.get(one, 0) + 1
    if group is None:
        atexit.unregister(_at_exit)


def end(backend: Any, abort: bool) -> None:
    """Shut down one communicator."""
    names = ("abort", "shutdown") if abort else ("shutdown",)
    call = next((c for name in names if (c := getattr(backend, name, None)) is not None), None)
    if call is not None:
        call()


def store_of(group: dist.ProcessGroup, name: str) -> dist.Store:
    """The place in the group's store where the ranks of the communicator ``name`` meet.

    Several of one name may follow each other, if each is closed before the next.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    store = dist.distributed_c10d._get_process_group_store(group)
    again = _closed.get(group, 0)
    return dist.PrefixStore(f"{name}/{again}/" if again else f"{name}/", store)


def timeout_of(group: dist.ProcessGroup, device: Any) -> timedelta:
    """The time limit of a group's operations on ``device``."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def _at_exit() -> None:
    close(abort=True)
