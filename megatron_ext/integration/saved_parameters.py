"""Weights keep their identity in backward, whatever saved-tensor hooks are around forward.

Under such hooks, ours that offload activations or a user's, autograd hands a custom function a new
tensor for each parameter that it saved. Functions that add weight gradients themselves look for
attributes of the parameter (``main_grad``, ``grad_added_to_main_grad``) and would find none, or set
them, and gradients, where nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .hooks import Hook
from .targets import LINEAR, SAVED_TENSORS, TE_FUNCTIONS
from .utils import untraced

_KEEPS = "_megatron_ext_keeps_parameters"  # attribute of functions that see parameters


def hooks() -> tuple[Hook, ...]:
    """For the functions of Megatron, of Transformer Engine where it is loaded, and of others."""
    why = "weight gradients would be lost where activations are offloaded"
    every = Hook(LINEAR, with_parameters, why), Hook(SAVED_TENSORS, as_parameters, why)
    return *every, *transformer_engine_hooks()


def transformer_engine_hooks() -> tuple[Hook, ...]:
    """Also for layers that are called several times for a microbatch."""
    why = "weight gradients of a step's first microbatch would be lost"
    loaded = [target for target in TE_FUNCTIONS if target.loaded and target.exists]
    return tuple(Hook(target, with_parameters, why) for target in loaded)


def with_parameters(original: Any) -> Any:
    """An autograd function whose backward sees parameters as its forward did; that itself, if it
    does so already."""
    if hasattr(original, _KEEPS):
        return original

    class WithParameters(original):  # type: ignore[misc]
        """The function as it was, but for parameters."""

        @staticmethod
        @untraced
        def backward(ctx: Any, *grads: Any) -> Any:
            _add_in_every_call(ctx)
            return original.backward(ReadOnce(ctx), *grads)

    return named_as(original, WithParameters)


def as_parameters(original: Any) -> property:
    """What forward saved, as the backward pass of any function reads it: parameters as such.

    Args:
        original: torch's own descriptor.
    """
    return property(lambda ctx: _restored(original.__get__(ctx)))


def _restored(saved: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(parameter_of(x) if isinstance(x, torch.Tensor) else x for x in saved)


def _add_in_every_call(ctx: Any) -> None:
    """Transformer Engine's first call of a step overwrites ``main_grad``, which is zero there. Of
    chunks of tokens and slices that call is the last in backward: it would lose the others."""
    holders: tuple[Any, ...] = ctx, getattr(ctx, "backward_objects", None)  # of newer versions
    for holder in holders:
        if getattr(holder, "is_first_microbatch", None):
            holder.is_first_microbatch = False


def named_as(original: Any, replacement: Any) -> Any:
    """``replacement``, a subclass, with the original's names."""
    replacement.__name__, replacement.__qualname__ = original.__name__, original.__qualname__
    setattr(replacement, _KEEPS, True)
    return replacement


def parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that a saved ``tensor`` is: saved-tensor hooks give another one in its place,
    which has the same gradient accumulator; anything else as it is, such as a stage's input, which
    has that too but no memory any more."""
    if isinstance(tensor, torch.nn.Parameter) or not (tensor.is_leaf and tensor.requires_grad):
        return tensor
    node: Any = torch.autograd.graph.get_gradient_edge(tensor).node
    found: torch.Tensor = node.variable
    return found if isinstance(found, torch.nn.Parameter) else tensor


class ReadOnce:
    """An autograd context whose saved tensors are unpacked once, parameters as parameters.

    Args:
        ctx: the function's.
    """

    __slots__ = ("_ctx", "_saved")
    _saved: tuple[Any, ...] | None

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_saved", None)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What forward saved."""
        found = self._saved
        if found is None:
            found = _restored(self._ctx.saved_tensors)
            object.__setattr__(self, "_saved", found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)
