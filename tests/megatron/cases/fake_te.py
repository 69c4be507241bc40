"""Stand-ins for Transformer Engine's linear modules that run on a CPU.

Written from what those modules do with their weight-gradient store, not from their code: they ask
it in forward and backward, leave (tensors, function) in it, and finish in ``backward_dw``. Where a
real one returns memory that means nothing (a dummy gradient beside a fused accumulation, an output
buffer that W will fill), these return NaNs, so that whatever uses it shows.

With tensor parallelism they do what Transformer Engine 2.3 to 2.20 does without userbuffers: B
gathers the input of a column-parallel module and the output gradient of a row-parallel one, leaves
the gathered tensors in the store, and asks for its input gradient's reduction before and waits for
it after it has left them there.

``TE*`` below are what megatron-core's wrappers make of them.
"""

from __future__ import annotations

import queue
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

NAN = float("nan")


class Store:
    """First in, first out, and on for good or off for good."""

    def __init__(self, delay: bool = False) -> None:
        self.context = queue.Queue() if delay else None
        self.delay = delay

    def delay_wgrad_compute(self) -> bool:
        return self.delay

    def put(self, tensors: list[Any], function: Any) -> None:
        self.context.put([tensors, function])

    def pop(self) -> tuple[Any, Any]:
        tensors, function = self.context.get_nowait()
        return function(*tensors), tensors


def _dummy(weight: torch.nn.Parameter) -> torch.Tensor:
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, NAN)


def _gather(part: torch.Tensor, group: Any) -> torch.Tensor:
    total = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(total, part.contiguous(), group=group)
    return total


def _reduce(total: torch.Tensor, module: Any) -> tuple[torch.Tensor, Any]:
    """Scattered along the sequence if the module's is in parts; and what to wait for."""
    group = module.tp_group
    if not module.sequence_parallel:
        return total, dist.all_reduce(total, group=group, async_op=True)
    part = total.new_empty(total.shape[0] // group.size(), *total.shape[1:])
    return part, dist.reduce_scatter_tensor(part, total, group=group, async_op=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, module: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        column, row = (module.parallel_mode == mode for mode in ("column", "row"))
        ctx.gathers_input = column and module.sequence_parallel
        ctx.gathers_gradient = row and module.sequence_parallel
        ctx.column, ctx.module = column and module.tp_size > 1, module
        ctx.bias, ctx.fused = bias, module.fuse_wgrad_accumulation
        # The newest versions ask in forward already, and forget a store that says no.
        ctx.store = module.wgrad_store if module.wgrad_store.delay_wgrad_compute() else None
        ctx.early_bias, ctx.more = module.early_bias, module.more_results
        y = F.linear(_gather(x, module.tp_group) if ctx.gathers_input else x, weight, bias)
        if row and module.tp_size > 1:
            y, work = _reduce(y, module)
            work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.gathers_gradient:
            dy = _gather(dy, ctx.module.tp_group)
        if ctx.gathers_input:
            x = _gather(x, ctx.module.tp_group)
        dx, work = dy.matmul(weight), None
        if ctx.column:
            dx, work = _reduce(dx, ctx.module)
        use_bias, fused = ctx.bias is not None, ctx.fused
        bias_gradient = None
        if use_bias and ctx.early_bias:  # as in FP8
            bias_gradient = dy.reshape(-1, dy.shape[-1]).sum(dim=0)
        w_computes_bias = use_bias and bias_gradient is None

        more = ctx.more

        def wgrad(x: torch.Tensor, dy: torch.Tensor) -> Any:
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            dw = dy.t().matmul(x)
            if fused:
                weight.main_grad.add_(dw)
                dw = weight.main_grad
            return dw, dy.sum(dim=0) if w_computes_bias else None, *more

        dw = None
        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            ctx.store.put([x, dy], wgrad)
        else:
            dw, late, *_ = wgrad(x, dy)
            bias_gradient = late if bias_gradient is None else bias_gradient
        if work is not None:
            work.wait()
        return dx, _dummy(weight) if fused else dw, bias_gradient, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, splits: Any, module: Any, *parameters: Any) -> torch.Tensor:
        n = module.num_gemms
        weights, biases = parameters[:n], parameters[n:]
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.use_bias = splits, bool(biases)
        ctx.fused, ctx.store = module.fuse_wgrad_accumulation, module.wgrad_store
        parts = x.split(splits)
        none = [None] * n
        return torch.cat([F.linear(p, w, b) for p, w, b in zip(parts, weights, biases or none)])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        xs, dys, n = list(x.split(ctx.splits)), list(dy.split(ctx.splits)), len(weights)
        dx = torch.cat([g.matmul(w) for g, w in zip(dys, weights)])
        fused, use_bias = ctx.fused, ctx.use_bias
        outs = [w.main_grad if fused else torch.full_like(w, NAN) for w in weights]

        def wgrad(xs: Any, dys: Any, outs: Any) -> Any:
            for x, g, out in zip(xs, dys, outs):
                out.add_(g.t().matmul(x)) if fused else out.copy_(g.t().matmul(x))
            return None, [g.sum(dim=0) if use_bias else None for g in dys], None

        bias_gradients = [None] * n
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([xs, dys, outs], wgrad)
        else:
            _, bias_gradients, _ = wgrad(xs, dys, outs)
        # The buffers themselves are handed to autograd, filled or not.
        returned = [_dummy(w) for w in weights] if fused else outs
        return dx, None, None, *returned, *(bias_gradients if use_bias else ())


class _Base(torch.nn.Module):
    def _init(self, bias: bool, fused: bool, delay: bool = False) -> None:
        self.use_bias, self.fuse_wgrad_accumulation = bias, fused
        self.early_bias = False
        self.more_results: tuple[None, ...] = ()  # older versions' W returns four results
        self.wgrad_store = Store(delay)

    def need_backward_dw(self) -> bool:
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        (dw, db, *_), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = dw.to(self.weight.dtype)  # set, not added to
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = db.to(self.bias.dtype)


class Linear(_Base):
    """``return_bias``: leave it to the caller to add the bias.

    Parallel mode, size and group are attributes as in Transformer Engine; ``shard`` sets them.
    """

    weight_names, bias_names = ["weight"], ["bias"]
    parallel_mode, sequence_parallel, tp_size, tp_group = None, False, 1, None

    def __init__(
        self, inputs: int, outputs: int, bias=True, return_bias=False, fused=False, delay=False
    ) -> None:
        super().__init__()
        self._init(bias, fused, delay)
        self.return_bias = return_bias and bias
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.randn(outputs)) if bias else None

    def shard(self, mode: str, group: Any, sequence_parallel: bool) -> None:
        """As built for ``group``; the sizes given were this rank's."""
        self.parallel_mode, self.tp_group, self.tp_size = mode, group, group.size()
        self.sequence_parallel = sequence_parallel and self.tp_size > 1

    def forward(self, x: torch.Tensor) -> Any:
        bias = None if self.return_bias else self.bias
        y = _Linear.apply(x, self.weight, bias, self)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    """The norm's own gradients are part of B."""

    def __init__(self, inputs: int, outputs: int, **more: Any) -> None:
        super().__init__(inputs, outputs, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(inputs))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(inputs))

    def forward(self, x: torch.Tensor) -> Any:
        shape = (x.shape[-1],)
        return super().forward(F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias))


class GroupedLinear(_Base):
    """``return_bias`` as above, one bias for each of the ``num_gemms`` experts."""

    def __init__(
        self, num_gemms, inputs: int, outputs: int, bias=True, return_bias=False, fused=False
    ) -> None:
        super().__init__()
        self._init(bias, fused)
        self.num_gemms, self.return_bias = num_gemms, return_bias and bias
        for i in range(num_gemms):
            weight = torch.randn(outputs, inputs) / inputs**0.5
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.randn(outputs)))
            else:
                setattr(self, f"bias{i}", torch.Tensor())  # there, but no parameter

    def _all(self, name: str) -> list[torch.nn.Parameter]:
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]

    def forward(self, x: torch.Tensor, splits: list[int]) -> Any:
        splits = splits if isinstance(splits, list) else splits.tolist()
        biases = self._all("bias") if self.use_bias else []
        inside = [] if self.return_bias else biases
        y = _Grouped.apply(x, splits, self, *self._all("weight"), *inside)
        return (y, biases) if self.return_bias else y

    def backward_dw(self) -> None:
        if not self.need_backward_dw() or self.wgrad_store.context.empty():
            return
        (_, bias_gradients, _), tensors = self.wgrad_store.pop()
        for i in range(self.num_gemms):
            weight = getattr(self, f"weight{i}")
            if not self.fuse_wgrad_accumulation:
                weight.grad = tensors[2][i].to(weight.dtype)
            if self.use_bias and getattr(self, f"bias{i}").grad is None:
                bias = getattr(self, f"bias{i}")
                bias.grad = bias_gradients[i].to(bias.dtype)


def _wrapped(cls: type, mode: str = "") -> type:
    """As megatron-core wraps them: (output, bias or None), and a ``backward_dw`` that does nothing
    unless Megatron's own way of postponing is on.

    Args:
        cls: a module above.
        mode: "column" or "row"; none for experts.
    """

    class Wrapper(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *sizes: int, config: Any, bias: bool, skip_bias_add: bool, **unused):
            more = {"delay": config.delay_wgrad_compute} if mode else {}
            own, tp = list(sizes), config.tensor_model_parallel_size if mode else 1
            own[mode == "column"] //= tp
            fused = FUSED
            super().__init__(*own, bias=bias, return_bias=skip_bias_add, fused=fused, **more)
            self.config = config
            if mode:
                from megatron.core.parallel_state import get_tensor_model_parallel_group

                group = unused.get("tp_group") or get_tensor_model_parallel_group()
                self.shard(mode, group, config.sequence_parallel)
            for name, parameter in self.named_parameters(recurse=False):
                parameter.allreduce = not unused.get("is_expert", False)
                if "weight" in name and "norm" not in name:
                    parameter.partition_dim = 0
                elif config.sequence_parallel and (mode == "row" or "norm" in name):
                    parameter.sequence_parallel = True  # Megatron reduces these over the ranks

        def forward(self, *inputs: Any) -> Any:
            out = super().forward(*inputs)
            return out if self.return_bias else (out, None)

        def backward_dw(self) -> None:
            if self.config.delay_wgrad_compute:
                super().backward_dw()

    Wrapper.__module__ = "megatron.core.extensions.transformer_engine"
    return Wrapper


# Whether the wrappers' modules add into main_grad themselves; megatron-core's flag for that wants
# Apex or Transformer Engine.
FUSED = False
TELinear = _wrapped(Linear, "row")
TELayerNormColumnParallelLinear = _wrapped(LayerNormLinear, "column")
TEGroupedLinear = _wrapped(GroupedLinear)
