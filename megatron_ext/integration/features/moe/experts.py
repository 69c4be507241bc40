"""The region of one of Megatron's layers, and its experts in the precision of a forward pass."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ....moe.buffers import Memory
from ....moe.exchange import Exchange, Groups
from ....moe.region import Region
from ....runtime.wgrad import WeightGradStore
from ...gradients import accumulate, finish, take
from ...hooks import Hook
from ...split_local import linear_hook
from ...split_te import SplitStore, attach
from ...support import CHUNKS, require_allowed
from .flex import FlexRegion, Streams

__all__ = ["ExpertGradients", "FlexRegion", "Region", "checkpoint", "region_of"]


def region_of(
    layer: Any, device: torch.device, memory: Callable[[], Memory], weights: ExpertGradients
) -> Region | FlexRegion:
    """What runs the routed part of ``layer`` in chunks, by its dispatcher.

    Args:
        memory: what the rank's layers share, if this one needs any.
        weights: computes weight gradients once for all chunks, or later.

    Raises:
        ConfigError: its configuration asks for what would train wrong numbers in chunks.
    """
    require_allowed(layer.config, {CHUNKS})
    dispatcher, experts = layer.token_dispatcher, layer.experts
    if layer.config.moe_token_dispatcher_type == "flex":
        return FlexRegion(layer, LayerExperts(layer), Streams(device))
    tensor = dispatcher.tp_group if dispatcher.tp_size > 1 else None
    groups = Groups(dispatcher.ep_group, tensor, dispatcher.tp_ep_group)
    exchange = Exchange(groups, layer.config.num_moe_experts)
    weights.attach(experts)
    return Region(
        exchange,
        LayerExperts(layer, _RECOMPUTES),
        list(experts.parameters()),
        memory(),
        weights,
        _linears(experts),
        bool(getattr(experts, _RECOMPUTES, False)),
    )


_RECOMPUTES = "activation_recompute"  # of grouped experts: --recompute-modules moe_act


def _linears(experts: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """fc1 and fc2: of all experts, or of each."""
    found = []
    for one in experts.modules():
        fc1, fc2 = (getattr(one, name, None) for name in ("linear_fc1", "linear_fc2"))
        if isinstance(fc1, torch.nn.Module) and isinstance(fc2, torch.nn.Module):
            found.append((fc1, fc2))
    return found


class LayerExperts:
    """The experts of one layer: ``Region.experts``.

    Transformer Engine quantizes inside a context around the forward pass. When a chunk's experts
    are computed again, that is over, and they would silently be computed in bf16; so what was in
    force is entered again.

    Args:
        layer: the ``MoELayer``, held weakly: it is the key under which this is kept.
        without: a switch of the experts that is off here: Megatron's own recomputation refuses to
            run in a backward pass of ours, which has another.
    """

    def __init__(self, layer: Any, without: str = "") -> None:
        self._layer: Callable[[], Any] = weakref.ref(layer)
        self._without = without
        self._again: Callable[[], Any] = contextlib.nullcontext

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        layer = self._layer()
        context: Any = contextlib.nullcontext()
        if is_quantized(layer.config):
            now = _in_force()
            if now is None:
                context = self._again()
            else:
                self._again = now
        with context, _off(layer.experts, self._without):
            output, bias = layer.experts(rows, counts, probs)
        assert bias is None, "experts with a bias behind combine: add --disable-bias-linear"
        result: torch.Tensor = output
        return result


@contextlib.contextmanager
def _off(module: torch.nn.Module, switch: str) -> Iterator[None]:
    """With ``switch`` of ``module`` off, where it is on."""
    before = getattr(module, switch, False) if switch else False
    if before:
        setattr(module, switch, False)
    try:
        yield
    finally:
        if before:
            setattr(module, switch, before)


def is_quantized(config: Any) -> bool:
    """True if layers of ``config`` compute in FP8 or FP4."""
    return bool(config.fp8 or getattr(config, "fp4", None))


def checkpoint(layer: Any, run: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """``run``, computed again in backward, as ``MoELayer`` does for its own forward pass."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_layer

    if is_quantized(layer.config):  # it enters the precision again
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return moe_layer.te_checkpoint(run, False, tracker, layer.attn_tp_group, *inputs)
    return tensor_parallel.checkpoint(run, False, *inputs)


def _in_force() -> Callable[[], Any] | None:
    """Gives a context like Transformer Engine's innermost one; None: it does not quantize now."""
    from megatron.core import fp8_utils

    state = fp8_utils.FP8GlobalStateManager
    if not state.is_fp8_enabled():
        return None
    return functools.partial(  # for FP4 too
        fp8_utils.transformer_engine.pytorch.fp8_autocast,
        enabled=True,
        fp8_recipe=state.get_fp8_recipe(),
        fp8_group=state.get_fp8_group(),
    )


class ExpertGradients:
    """What ``Region`` asks of a weight-gradient store.

    Where a B pass of the schedule runs, its W pass computes them. Otherwise they are computed at
    the end of the layer's backward pass, and go through autograd as any layer's.

    Args:
        store: of a schedule with W passes, whose hooks are in place; None: there is none.
        fused: True where each chunk computes them, and nothing is taken.
    """

    def __init__(self, store: WeightGradStore | None, fused: Callable[[], bool]) -> None:
        self._own = store is None
        self._store = WeightGradStore() if store is None else store
        self._store.fused_experts = fused
        self.suspended = self._store.suspended
        self._waits = False
        self._attached: weakref.WeakSet[SplitStore] = weakref.WeakSet()

    def hooks(self) -> tuple[Hook, ...]:
        """What lets Megatron's own linear layers leave weight gradients to the store."""
        return (linear_hook(self._store),) if self._own else ()

    def attach(self, experts: torch.nn.Module) -> None:
        """The same for modules of Transformer Engine."""
        self._attached.update(attach(experts, self._store))

    def close(self) -> None:
        """Undo ``attach``."""
        while self._attached:
            self._attached.pop().detach(self._store)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """The backward pass of one call, until the last chunk's input gradient has been issued."""
        self._waits = self._store.collecting
        with contextlib.ExitStack() as stack:
            if not self._waits:
                stack.enter_context(self._store.collect(self, returned=True))
            stack.enter_context(self._store.in_parts())
            yield

    def takes(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None) -> bool:
        """As of ``GradientStore``."""
        if grad is None or self._store.placeholder(parameter):
            return self._store.holds(parameter)
        if not self._waits or not self._store.holds(parameter):
            return False
        # B has part of it, such as a bias that is added outside the layer that postpones. It waits
        # for W, so that the order of summands does not depend on the schedule.
        with self._store.in_parts():
            # Autograd may give one tensor for several parameters.
            task = functools.partial(accumulate, parameter, grad.clone())
            self._store.put(parameter, task, done=finish)
        return True

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Sequence[torch.Tensor | None]:
        """As of ``GradientStore``."""
        if self._waits:
            return [None] * len(parameters)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            self._store.run(self, finish=False)
            return [take(parameter) for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad
