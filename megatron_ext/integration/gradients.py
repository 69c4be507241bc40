"""Weight gradients that are added outside of autograd, for Megatron's data parallelism."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime.weight_hooks import known
from ..runtime.wgrad import WeightGradStore
from .hooks import Hook
from .support import WRAPPED, require
from .targets import DDP_HOOK_MAKER

DDP_HOOK = "_megatron_ext_grad_hook"  # attribute of a parameter: a reference to Megatron's hook
_LATE = "_megatron_ext_grad_hooks"  # attribute of the model: those made after it was wrapped
_OWNER = "_megatron_ext_wrapper"  # attribute of a hook: the model that it is of
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
        hook_of = {p: _megatrons_hook(p) for p in model.parameters() if p.requires_grad}
        # Of a former wrapper it would reduce in that one's buffers.
        late = [p for p, hook in hook_of.items() if getattr(hook, _OWNER, None) is not model]
        if not late:
            continue
        te = any(hasattr(module, "wgrad_store") for module in model.modules())
        require(WRAPPED, not (model.ddp_config.overlap_grad_reduce or te))
        for parameter in late:
            hook = make(parameter)
            setattr(hook, _OWNER, model)
            vars(model).setdefault(_LATE, []).append(hook)
            setattr(parameter, DDP_HOOK, weakref.ref(hook))


def _megatrons_hook(parameter: torch.nn.Parameter) -> Callable[..., None] | None:
    """Known weakly: it refers to the model, and what a parameter refers to is never collected,
    since autograd holds it, too."""
    held = getattr(parameter, DDP_HOOK, None)
    return None if held is None else held()


def gradient_hook() -> Hook:
    """Keeps Megatron's hook, for gradients that autograd does not make, and holds it back where a B
    pass has postponed them."""
    return Hook(
        DDP_HOOK_MAKER,
        _deferring_hook,
        "gradients would be reduced before their W pass has run, or not at all",
    )


def _deferring_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = original(self, param)
        setattr(hook, _OWNER, self)
        setattr(param, DDP_HOOK, weakref.ref(hook))

        @known
        def unless_postponed(*unused: Any) -> None:
            # Autograd calls this in B although the weight has no gradient yet (or a meaningless
            # one); its W calls ``hook``, once, when it has. The model may outlive a store, and
            # train under another one, or none.
            store = WeightGradStore.running
            if store is not None and store.placeholder(param):
                param.grad = None
            elif store is None or not _waits(param, store):
                hook(*unused)
            elif param.grad is not None:
                _postpone_rest(param, store)

        return unless_postponed

    return _make_backward_post_hook


def _waits(param: torch.nn.Parameter, store: WeightGradStore) -> bool:
    return store.collecting and (store.holds(param) or store.owes(param))


def _postpone_rest(param: torch.nn.Parameter, store: WeightGradStore) -> None:
    """B has part of the gradient (another layer uses the weight too), or has all of it while an
    earlier microbatch's part is owed: it waits for its W, so that the order of summands and what
    counts as ready stay right."""
    grad, param.grad = param.grad, None
    added = getattr(param, "grad_added_to_main_grad", False)
    if added and not getattr(param, "zero_out_wgrad", False):
        # The layer added it to main_grad and returned what Megatron's hook would ignore.
        task = functools.partial(mark_added, param)
    else:
        assert grad is not None  # the caller has looked
        task = functools.partial(accumulate, param, grad)
    store.put(param, task, done=finish)


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
    hook = _megatrons_hook(parameter)
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
