"""Weights keep their identity in backward while activations are offloaded.

Under saved-tensor hooks autograd hands a custom function a new tensor for each parameter that it
saved. Functions that add weight gradients themselves look for attributes of the parameter
(``main_grad``, ``grad_added_to_main_grad``) and would find none, or set them where nobody looks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .hooks import Hook

_MEGATRON = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
_TE = "transformer_engine.pytorch.module"
_TE_FUNCTIONS = (
    (f"{_TE}.linear", "_Linear"),
    (f"{_TE}.layernorm_linear", "_LayerNormLinear"),
    (f"{_TE}.layernorm_mlp", "_LayerNormMLP"),
    (f"{_TE}.grouped_linear", "_GroupedLinear"),
)

Find = Callable[[torch.Tensor], torch.Tensor]


def hooks(find: Find) -> tuple[Hook, ...]:
    """For the functions of Megatron, and of Transformer Engine where it is loaded.

    Args:
        find: gives the parameter that a tensor is, or the tensor itself.
    """
    targets = [_MEGATRON]
    for module, name in _TE_FUNCTIONS:
        if hasattr(sys.modules.get(module), name):
            targets.append(f"{module}:{name}")
    return tuple(
        Hook(
            (target,),
            lambda original: _with_parameters(original, find),
            (),
            "weight gradients would be lost where activations are offloaded",
        )
        for target in targets
    )


def _with_parameters(original: Any, find: Find) -> Any:
    class WithParameters(original):  # type: ignore[misc]
        """The function as it was; its backward sees parameters as forward did."""

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return original.backward(_Context(ctx, find), *grads)

    WithParameters.__name__ = original.__name__
    WithParameters.__qualname__ = original.__qualname__
    return WithParameters


class _Context:
    """An autograd context whose saved parameters are the parameters."""

    __slots__ = ("_ctx", "_find")

    def __init__(self, ctx: Any, find: Find) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_find", find)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(
            self._find(saved) if isinstance(saved, torch.Tensor) else saved
            for saved in self._ctx.saved_tensors
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)
