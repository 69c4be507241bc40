"""B and W as two passes for Megatron's own linear layers.

All weight-gradient work of the local column- and row-parallel layers is in the backward of one
autograd class. Ours postpones that part into the weight-gradient store while a B pass runs, and is
Megatron's otherwise. It is Megatron's for the output layer too: the gradient of its logits is the
largest tensor of the model, and would wait for W with every set that does.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.sharded import Sharded, mark_gathered, sharded, whole
from ..runtime.wgrad import WeightGradStore
from .gradients import accumulate, finish, gradient_hook, mark_added
from .hooks import Hook
from .saved_parameters import ReadOnce, named_as
from .targets import LINEAR, REDUCE_SCATTER
from .utils import untraced

_LAYERS = "megatron.core.tensor_parallel.layers"


def linear_hook(store: WeightGradStore) -> Hook:
    """The hook that lets ``store`` receive weight gradients while it collects."""
    return Hook(
        LINEAR,
        lambda original: _split_linear(original, store),
        "weight gradients could not be delayed",
    )


def hooks(store: WeightGradStore) -> tuple[Hook, ...]:
    """The hooks of schedules with W passes."""
    return (
        linear_hook(store),
        gradient_hook(),
        Hook(
            REDUCE_SCATTER,
            lambda original: _noting_scatter(original, store),
            "gathered output gradients would be kept until W",
        ),
    )


def _split_linear(original: Any, store: WeightGradStore) -> Any:
    # Megatron's decorator: the products of B and W are as precise as autocast made those of F.
    as_in_forward = importlib.import_module(_LAYERS).custom_bwd

    class SplitLinear(original):  # type: ignore[misc]
        """Megatron's linear function; its backward leaves W to the store inside a B pass."""

        # Not traced, and so not in the graph of a compiled layer: which passes run is not known
        # then. The function runs by itself, between two graphs.
        @staticmethod
        @untraced
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            # Once: a checkpoint computes saved tensors again, and hands each out a single time.
            ctx = ReadOnce(ctx)
            if store.collecting:
                weight = ctx.saved_tensors[1]
                if can_split(ctx, weight) and store.postpones(weight):
                    part = as_in_forward(_input_gradient_only)
                    return part(ctx, grad_output, store, as_in_forward)
            return original.backward(ctx, grad_output)

    return named_as(original, SplitLinear)


def _noting_scatter(original: Any, store: WeightGradStore) -> Any:
    class NotingScatter(original):  # type: ignore[misc]
        """After a row-parallel layer; its backward gathers what such a layer needs in W."""

        @staticmethod
        @untraced
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            result = original.backward(ctx, grad_output)
            if store.collecting and ctx.input_split_sizes is None and ctx.group.size() > 1:
                mark_gathered(result[0], grad_output, ctx.group)
            return result

    return named_as(original, NotingScatter)


def is_output_weight(weight: Any) -> bool:
    """True for the output layer's weight, and for embeddings; Megatron marks both."""
    return bool(getattr(weight, "is_embedding_or_output_parameter", False))


def can_split(holder: Any, weight: Any) -> bool:
    """True if W may compute the gradient of a linear layer's weight.

    Args:
        holder: the layer, or the context of its autograd function.
    """
    # Computed from parameters, as torch's parametrizations do, it passes its gradient on to them.
    if not weight.requires_grad or not weight.is_leaf:
        return False
    # These keep or gather weights in ways of their own; they run fused, which is always right.
    buffered = getattr(holder, "grad_output_buffer", None) is not None
    rematerialised = getattr(holder, "gtp_remat_size", 1) > 1
    kept = buffered or rematerialised or hasattr(weight, "__fsdp_param__")
    return not (kept or is_output_weight(weight))


def _input_gradient_only(
    ctx: Any, grad_output: torch.Tensor, store: WeightGradStore, as_in_forward: Any
) -> Any:
    x, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    work = None
    if ctx.sequence_parallel:
        shard = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        work = dist.reduce_scatter_tensor(shard, grad_input, group=ctx.tp_group, async_op=True)
        result = shard
    else:
        if ctx.allreduce_dgrad:
            work = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        result = grad_input
    grad_bias = None
    if ctx.use_bias:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
    if ctx.gradient_accumulation_fusion:
        # Autograd may hand back a weight without it: Megatron keeps the buffer in the context.
        weight.main_grad = ctx.main_grad
    # Without its history: that would keep what other layers left in it until W.
    total: Any = x.detach()
    if ctx.sequence_parallel:
        total = Sharded(total, ctx.tp_group)
    state = types.SimpleNamespace(_fwd_used_autocast=ctx._fwd_used_autocast, _dtype=ctx._dtype)
    product = functools.partial(as_in_forward(_weight_gradient), state, weight)
    fused, operands = ctx.gradient_accumulation_fusion, (total, sharded(grad_output))
    store.put(
        weight,
        functools.partial(accumulate_fused, weight) if fused else product,
        rows=operands,
        done=finish,
        sharded=[one for one in operands if isinstance(one, Sharded)],
    )
    if work is not None:
        work.wait()
    return (result, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)


@torch.no_grad()
def _weight_gradient(
    state: Any,
    weight: torch.nn.Parameter,
    x: torch.Tensor | Sharded,
    grad_output: torch.Tensor | Sharded,
) -> None:
    """W of one layer: the same arithmetic, in the same order, as Megatron's own backward."""
    accumulate(weight, _rows(grad_output).t().matmul(_rows(x)))


@torch.no_grad()
def accumulate_fused(
    weight: Any, x: torch.Tensor | Sharded, grad_output: torch.Tensor | Sharded
) -> None:
    """W of one layer, added to ``main_grad`` by Apex's kernel."""
    import fused_weight_gradient_mlp_cuda as kernels  # Apex's; Megatron imports the same

    single = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if single else kernels.wgrad_gemm_accum_fp16
    add(_rows(x), _rows(grad_output), weight.main_grad)
    mark_added(weight)


def _rows(tensor: torch.Tensor | Sharded) -> torch.Tensor:
    # Apex's kernel takes a pointer, without strides.
    tensor = whole(tensor).contiguous()
    return tensor.view(-1, tensor.shape[-1])
