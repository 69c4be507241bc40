"""B and W as two passes for Megatron's own linear layers.

All weight-gradient work of the local column- and row-parallel layers (and of the output layer) is
in the backward of one autograd class. Ours postpones that part into the weight-gradient store
while a B pass runs, and is Megatron's otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.wgrad import WeightGradStore
from ...gradients import DDP_HOOK, accumulate, finish, mark_added
from ...hooks import Hook

_LAYERS = "megatron.core.tensor_parallel.layers"


def hooks(store: WeightGradStore) -> tuple[Hook, ...]:
    """The hooks that let ``store`` receive the weight gradients."""
    return (
        Hook(
            (f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication",),
            lambda original: _split_linear(original, store),
            (),
            "weight gradients could not be delayed",
        ),
        Hook(
            (
                "megatron.core.distributed.distributed_data_parallel:"
                "DistributedDataParallel._make_backward_post_hook",
            ),
            lambda original: _deferring_hook(original, store),
            ("self", "param"),
            "gradients would be reduced before their W pass has run",
        ),
    )


def _split_linear(original: Any, store: WeightGradStore) -> Any:
    class SplitLinear(original):  # type: ignore[misc]
        """Megatron's linear function; its backward leaves W to the store inside a B pass."""

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            weight = ctx.saved_tensors[1]
            if not store.collecting or not weight.requires_grad or not _can_split(ctx, weight):
                return original.backward(ctx, grad_output)
            return _input_gradient_only(ctx, grad_output, store)

    SplitLinear.__name__ = original.__name__
    SplitLinear.__qualname__ = original.__qualname__
    return SplitLinear


def _can_split(ctx: Any, weight: torch.Tensor) -> bool:
    # These keep or gather weights in ways of their own; they run fused, which is always right.
    buffered = ctx.grad_output_buffer is not None
    rematerialised = getattr(ctx, "gtp_remat_size", 1) > 1
    return not (buffered or rematerialised or hasattr(weight, "__fsdp_param__"))


def _input_gradient_only(ctx: Any, grad_output: torch.Tensor, store: WeightGradStore) -> Any:
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
    store.put(
        weight,
        functools.partial(
            _weight_gradient,
            # Without its history: that would keep what other layers left in it until W.
            x.detach(),
            grad_output,
            weight,
            ctx.tp_group if ctx.sequence_parallel else None,
            ctx.gradient_accumulation_fusion,
        ),
        done=finish,
    )
    if work is not None:
        work.wait()
    return (result, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)


@torch.no_grad()
def _weight_gradient(
    x: torch.Tensor,
    grad_output: torch.Tensor,
    weight: torch.nn.Parameter,
    gather_group: Any,
    fused: bool,
) -> None:
    """W of one layer: the same arithmetic, in the same order, as Megatron's own backward."""
    if gather_group is not None:
        shape = (x.shape[0] * gather_group.size(), *x.shape[1:])
        total = torch.empty(shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(total, x.contiguous(), group=gather_group)
        x = total
    x = x.reshape(-1, x.shape[-1])
    grad_output = grad_output.reshape(-1, grad_output.shape[-1])
    if fused:
        _accumulate_fused(x, grad_output, weight)
    else:
        accumulate(weight, grad_output.t().matmul(x))


def _accumulate_fused(x: torch.Tensor, grad_output: torch.Tensor, weight: Any) -> None:
    import fused_weight_gradient_mlp_cuda as kernels  # Apex's; Megatron imports the same

    single = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if single else kernels.wgrad_gemm_accum_fp16
    add(x, grad_output, weight.main_grad)
    mark_added(weight)


def _deferring_hook(original: Callable[..., Any], store: WeightGradStore) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = original(self, param)
        setattr(param, DDP_HOOK, hook)

        def unless_postponed(*unused: Any) -> None:
            # Autograd calls this in B although the weight has no gradient yet (or a meaningless
            # one); its W calls ``hook``, once, when it has.
            if store.placeholder(param):
                param.grad = None
            elif not store.collecting or not (store.holds(param) or store.owes(param)):
                hook(*unused)
            elif param.grad is not None:
                _postpone_rest(param, store)

        return unless_postponed

    return _make_backward_post_hook


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
