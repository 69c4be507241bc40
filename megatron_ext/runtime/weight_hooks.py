"""Hooks that a user has put on a parameter.

Autograd calls them with the parameter's gradient when a backward pass brings it. A gradient that W
computes comes later and past them, so layers with such a parameter compute it in B.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

_KNOWN = "_megatron_ext_known_hook"
# Megatron's own; what it does without a gradient, or with one of W, is known.
_DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_Hooks = weakref.WeakValueDictionary[int, Any]
# By identity of a parameter: the hooks of its gradient accumulator, after and before it. They live
# as long as that does, and it keeps the parameter alive.
_AFTER: _Hooks = weakref.WeakValueDictionary()
_BEFORE: _Hooks = weakref.WeakValueDictionary()

# By identity of a parameter: tensor hooks that ``without_tensor_hooks`` has taken for the moment.
_SILENCED: dict[int, Any] = {}


def known(hook: _Hook) -> _Hook:
    """Mark a hook of our own, which knows that gradients may come later."""
    setattr(hook, _KNOWN, True)
    return hook


def foreign_hooks(parameter: Any) -> tuple[str, ...]:
    """What kinds of hooks ``parameter`` has that are neither ours nor Megatron's; most have none.

    Asked for every weight in every B pass: it takes a microsecond where data parallelism keeps the
    gradient accumulator, and ten where each graph has a new one.
    """
    if not parameter.requires_grad:
        return ()
    found = []
    if _foreign(_SILENCED.get(id(parameter), parameter._backward_hooks)):
        found.append("tensor hook")
    if _foreign(parameter._post_accumulate_grad_hooks):
        found.append("post-accumulate-grad hook")
    if any(map(_foreign, _of_accumulator(parameter))):
        found.append("hook of the gradient accumulator")
    return tuple(found)


@contextlib.contextmanager
def without_tensor_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, no tensor hook of ``parameters`` is called: ``torch.autograd.grad`` would, with what
    may be a part of the gradient, and autograd calls it again where the gradient is returned.
    ``foreign_hooks`` still finds them."""
    silenced: list[tuple[int, Any]] = []
    for parameter in parameters:
        hooks: Any = parameter._backward_hooks
        if hooks:
            silenced.append((id(parameter), hooks))
            _SILENCED[id(parameter)] = dict(hooks)
            hooks.clear()
    try:
        yield
    finally:
        for key, hooks in silenced:
            hooks.update(_SILENCED.pop(key))


def _foreign(hooks: Any) -> bool:
    return bool(hooks) and not all(map(_is_known, hooks.values()))


def _is_known(hook: Any) -> bool:
    if getattr(hook, _KNOWN, False):
        return True
    named = getattr(hook, "__qualname__", "").startswith("DistributedDataParallel.")
    return named and getattr(hook, "__module__", "") == _DDP_MODULE


def _of_accumulator(parameter: torch.Tensor) -> list[Any]:
    key = id(parameter)
    found = [hooks.get(key) for hooks in (_AFTER, _BEFORE)]
    if found[0] is None or found[1] is None:
        # There is no list of them; but the handle of a new hook knows it.
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        for place, table in enumerate((_AFTER, _BEFORE)):
            register = node.register_prehook if place else node.register_hook
            handle = register(_nothing)
            found[place] = table[key] = handle.hooks_dict_ref()
            handle.remove()
    return found


def _nothing(*unused: Any) -> None:
    pass
