"""Weight gradients that are added outside of autograd, for Megatron's data parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import ConfigError
from .hooks import Hook

DDP_HOOK_MAKER = (
    "megatron.core.distributed.distributed_data_parallel:"
    "DistributedDataParallel._make_backward_post_hook"
)
DDP_HOOK = "_megatron_ext_grad_hook"  # attribute of a parameter: Megatron's hook
_ADDED = "_megatron_ext_added_to_main_grad"


def require_gradient_hooks(models: Sequence[Any]) -> None:
    """Megatron's data parallelism must have been built with our hook on its own in force.

    Where it was not, and reduces nothing before the end of an iteration, that is made up for here.

    Args:
        models: chunks, with their wrappers.

    Raises:
        ConfigError: gradients would be reduced before their W pass has run.
    """
    for model in models:
        make = getattr(model, "_make_backward_post_hook", None)
        if make is None:
            continue
        late = [p for p in model.parameters() if p.requires_grad and not hasattr(p, DDP_HOOK)]
        if not late:
            continue
        if model.ddp_config.overlap_grad_reduce or any(
            hasattr(module, "wgrad_store") for module in model.modules()
        ):
            raise ConfigError(
                "this schedule computes weight gradients in passes of their own, but the model was "
                "wrapped in Megatron's DistributedDataParallel before, which reduces them "
                "earlier (overlap_grad_reduce), or has layers of Transformer Engine; call "
                "megatron_ext.enable() before the model is wrapped"
            )
        for parameter in late:
            setattr(parameter, DDP_HOOK, make(parameter))


def gradient_hook() -> Hook:
    """Where no schedule postpones W: keeps Megatron's hook, for gradients that autograd does not
    make."""
    return Hook(
        (DDP_HOOK_MAKER,),
        _keeping_hook,
        ("self", "param"),
        "gradients of the vocabulary's shards would not be reduced",
    )


def _keeping_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook: Callable[..., None] = original(self, param)
        setattr(param, DDP_HOOK, hook)
        return hook

    return _make_backward_post_hook


def accumulate(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add ``grad`` to what this microbatch has for ``parameter``; ``finish`` passes it on.

    As autograd does: in place where there is a gradient, which may lie in a buffer of the
    trainer's, and in the type that the parameter wants its gradient in.

    Args:
        grad: nothing else reads it; later ones may be added to it.
    """
    if parameter.grad is not None:
        parameter.grad.add_(grad)
    else:
        dtype = getattr(parameter, "grad_dtype", None)  # None: any
        parameter.grad = grad if dtype is None else grad.to(dtype)


def add(parameter: Any, grad: torch.Tensor) -> None:
    """Add ``grad`` to ``main_grad`` at once, or where there is none, as ``accumulate``."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        accumulate(parameter, grad)
    else:
        main.add_(grad)
        mark_added(parameter)


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


def take(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What has been accumulated, for autograd to pass on in place of ``finish``."""
    added = parameter.__dict__.pop(_ADDED, False)
    grad, parameter.grad = parameter.grad, None
    return stand_in(parameter) if grad is None and added else grad


def stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros of ``parameter``'s shape in the memory of one number: the DDP hook wants to see a
    gradient even where a kernel has added it to ``main_grad`` already."""
    return _zero(parameter.dtype, parameter.device).expand(parameter.shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
