"""Weight gradients that are added outside of autograd, for Megatron's data parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch

DDP_HOOK = "_megatron_ext_grad_hook"  # attribute of a parameter: Megatron's hook
_ADDED = "_megatron_ext_added_to_main_grad"


def accumulate(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add ``grad`` to what this microbatch has for ``parameter``; ``finish`` passes it on."""
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def mark_added(parameter: Any) -> None:
    """A kernel has added a gradient into ``parameter.main_grad`` itself."""
    parameter.grad_added_to_main_grad = True
    setattr(parameter, _ADDED, True)


def finish(parameter: torch.nn.Parameter) -> None:
    """What autograd does after accumulating: Megatron's DDP hook, if there is one.

    Called once for a microbatch, after the last of its gradients of ``parameter``: two uses of one
    weight are summed first, as autograd does, and count as ready once.
    """
    added = parameter.__dict__.pop(_ADDED, False)
    hook = getattr(parameter, DDP_HOOK, None)
    if hook is None or (parameter.grad is None and not added):
        return
    if parameter.grad is None:
        parameter.grad = stand_in(parameter)
    hook()


def stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros of ``parameter``'s shape in the memory of one number: the DDP hook wants to see a
    gradient even where a kernel has added it to ``main_grad`` already."""
    return _zero(parameter.dtype, parameter.device).expand(parameter.shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
