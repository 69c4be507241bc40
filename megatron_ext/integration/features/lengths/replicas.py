"""Loss functions of data replicas whose steps have other slices, and another order, each.

A loss function that talks to the other replicas would do so unequally often, and wait for good, or
about other microbatches. The first call of each is watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ...runner import with_loss_function
from ...support import REPLICAS, require

_MESSAGES = ("c10d", "_c10d_functional")


class LossFunctions:
    """Those whose messages are known."""

    def __init__(self) -> None:
        self._known = set[Any]()

    def checked(self, step: Callable[..., Any], ranks: Sequence[int]) -> Callable[..., Any]:
        """A forward step whose loss function may talk to ``ranks`` only.

        Args:
            ranks: that take the same passes as this one.
        """

        def watched(output: Any, function: Callable[..., Any]) -> Callable[..., Any]:
            code = _code(function)
            if code in self._known:
                return function

            @functools.wraps(function)
            def first(*args: Any, **kwargs: Any) -> Any:
                self._known.add(code)
                with _Among(ranks):
                    return function(*args, **kwargs)

            return first

        return with_loss_function(step, watched)


class _Among(TorchDispatchMode):
    """Inside, messages stay among ``ranks``."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self._ranks = {*ranks}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raises:
        ConfigError: the operation is a message to others.
        """
        if func.namespace in _MESSAGES:
            for ranks in _ranks_of((*args, *(kwargs or {}).values())):
                require(REPLICAS, self._ranks >= {*ranks})
        return func(*args, **(kwargs or {}))


def _ranks_of(args: Sequence[Any]) -> Iterator[list[int]]:
    """Of the groups among the arguments of a message."""
    named = dist.distributed_c10d._world.pg_names
    names: dict[str, Any] = {name: group for group, name in named.items()}
    for one in args:
        if isinstance(one, str) and one in names:
            yield dist.get_process_group_ranks(names[one])
        elif isinstance(one, torch.ScriptObject):
            kind: Any = one
            if kind._type().name() == "ProcessGroup":
                yield dist.get_process_group_ranks(dist.ProcessGroup.unbox(one))


def _code(function: Any) -> Any:
    """What a loss function does, without what it is given by the step."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))
