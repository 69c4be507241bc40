"""What do MoE layers in chunks gain, with grouped products for Megatron's layer and ours alike?

One process stands for all ranks of its expert-parallel group: the others are its mirror images,
which send it what it sends. An all-to-all is a copy on a stream of its own and a wait there on 16
multiprocessors, as NCCL holds, as long as the rates below make it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu import model as gpu
from megatron_ext.integration.features.moe.layer import PipelinedMoE
from megatron_ext.integration.gradients import accumulate, finish
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy
from megatron_ext.runtime.wgrad import WeightGradStore

NETWORK, PEER, NODE = 42e9, 330e9, 8  # bytes/s of a device between nodes and in one; devices there
TOKENS, MULTIPROCESSORS = 4096, 16
WAYS = {"stock": STOCK, "stock, recompute": STOCK} | {
    f"{n} chunks, {strategy.value}": LayerPlan(n, strategy)
    for n, strategy in ((2, Strategy.NONE), (4, Strategy.NONE), (4, Strategy.S0), (4, Strategy.S4))
}


class Shape(NamedTuple):
    """One layer, bf16, SwiGLU, its experts spread over ``ranks``."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    ranks: int


SHAPES = (
    Shape("DeepSeek-V3, EP 64", 7168, 2048, 256, 8, 64),
    Shape("Qwen3-235B, EP 32", 4096, 1536, 128, 8, 32),
    Shape("Qwen3-30B, EP 16", 2048, 768, 128, 8, 16),
    Shape("Mixtral 8x7B, EP 8", 4096, 14336, 8, 2, 8),
)
TINY = (Shape("tiny, EP 8", 64, 32, 16, 8, 8),)


class _Product(torch.autograd.Function):
    """Rows of each expert times its weights, as one kernel; W goes to the store that collects."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: torch.nn.Parameter, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight = weight
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, ends), weight, store = ctx.saved_tensors, ctx.weight, WeightGradStore.running
        grad = grad.contiguous()
        to_x = torch._grouped_mm(grad, weight, offs=ends)
        work = functools.partial(torch._grouped_mm, grad.t(), x, offs=ends)
        if store is None or not store.collecting:
            return to_x, work(), None
        store.put(weight, lambda: accumulate(weight, work()), done=finish)
        return to_x, None, None


class _Grouped(torch.nn.Module):
    def __init__(self, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, outputs, inputs) * 0.02)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, ends)


class GroupedExperts(torch.nn.Module):
    """All local experts, without Transformer Engine."""

    def __init__(self, count: int, shape: Shape) -> None:
        super().__init__()
        self.linear_fc1 = _Grouped(count, 2 * shape.ffn, shape.hidden)
        self.linear_fc2 = _Grouped(count, shape.hidden, shape.ffn)

    def forward(self, rows: Any, tokens_per_expert: Any, probs: Any) -> tuple[torch.Tensor, None]:
        """(rows, hidden), sorted by expert -> the same, weighted by ``probs``."""
        counts = tokens_per_expert.to(rows.device, torch.int32, non_blocking=True)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = self.linear_fc1(rows, ends).chunk(2, -1)
        inside = torch.nn.functional.silu(gate) * up * probs.unsqueeze(-1).to(rows.dtype)
        return self.linear_fc2(inside, ends), None


class Mirror:
    """An expert-parallel group of one process, and its collectives; others are torch's."""

    def __init__(self, shape: Shape) -> None:
        self._ranks, near = shape.ranks, min(shape.ranks, NODE)
        # What a rank sends goes to other nodes and inside the node at once.
        self._seconds_per_byte = (
            max((shape.ranks - near) / NETWORK, (near - 1) / PEER) / shape.ranks
        )
        if gpu.CUDA:
            self._stream = torch.cuda.Stream(priority=-1)  # as training gives these messages
            self._waits = [torch.cuda.Stream() for _ in range(MULTIPROCESSORS)]
            torch.cuda._sleep(1_000_000)
            gpu.synchronize()
            started = time.perf_counter()
            torch.cuda._sleep(100_000_000)
            gpu.synchronize()
            self._cycles = 100_000_000 / (time.perf_counter() - started)

    def size(self) -> int:
        """So many mirror images."""
        return self._ranks

    @staticmethod
    def rank() -> int:
        """The first."""
        return 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, torch.distributed knows this group."""
        from megatron.core.tensor_parallel import mappings

        mine = {
            "get_world_size": self.size, "get_rank": self.rank,
            "all_reduce": lambda tensor, *_, **__: None,
            "all_gather_into_tensor": self._gather, "all_to_all_single": self._exchange,
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            for name, ours in mine.items():
                either = functools.partial(self._either, ours, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, either))
            gather = dist.all_gather_into_tensor
            stack.enter_context(mock.patch.object(mappings, "dist_all_gather_func", gather))
            yield

    def _either(self, ours: Any, torchs: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in (*args, kwargs.get("group")):
            return torchs(*args, **kwargs)
        kwargs.pop("group", None)
        return ours(*(one for one in args if one is not self), **kwargs)

    def _gather(self, out: Any, own: Any, async_op: bool = False) -> Any:
        out.copy_(own.repeat(self._ranks, *[1] * (own.dim() - 1)).view_as(out))
        return SimpleNamespace(wait=lambda: None) if async_op else None

    def _exchange(self, out: Any, rows: Any, *_: Any, async_op: bool = False, **__: Any) -> Any:
        """Fill ``out`` with as much; over when the network would be."""
        event = None
        if not gpu.CUDA:
            _fill(out, rows)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            cycles = int(rows.nbytes * self._seconds_per_byte * self._cycles)
            with torch.cuda.stream(self._stream):
                _fill(out, rows)
            for stream in self._waits if cycles else ():
                stream.wait_stream(self._stream)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)
            for stream in self._waits:
                self._stream.wait_stream(stream)
            event = torch.cuda.Event()
            event.record(self._stream)

        def wait() -> None:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

        return SimpleNamespace(wait=wait) if async_op else wait()


def _fill(out: torch.Tensor, rows: torch.Tensor) -> None:
    least = min(len(out), len(rows))
    out[:least].copy_(rows[:least])
    if least and len(out) > least:
        out[least:].copy_(rows[torch.arange(len(out) - least, device=out.device) % least])


def layer_of(shape: Shape, mirror: Mirror, te: bool) -> Any:
    """Megatron's MoE layer with this rank's experts, balanced routing, and buffers for gradients;
    with Transformer Engine's grouped experts (``te``) or the ones above."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = groups.tp_ep = mirror
    config = gpu.config(
        gpu.Size(shape.hidden, TOKENS), num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.ffn, moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, expert_model_parallel_size=shape.ranks,
        moe_grouped_gemm=te,
    )  # fmt: skip
    spec = gpu.get_gpt_layer_local_spec(num_experts=shape.experts).submodules.mlp
    if te:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

        spec = get_moe_module_spec(True, shape.experts, moe_grouped_gemm=True)
    given = {"config": config, "pg_collection": groups}
    layer = gpu.build_module(spec, **given) if hasattr(spec, "module") else spec(**given)
    layer.set_layer_number(1)
    if not te:
        layer.experts = GroupedExperts(shape.experts // shape.ranks, shape)
    layer = layer.to(gpu.DEVICE, gpu.BF16)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return layer


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rows by layer and way."""
    gpu.start()
    gpu.warm(0 if tiny else 3)
    result: dict[str, Any] = {"rows": []}
    for shape in TINY if tiny else SHAPES:
        result["rows"] += rows_of(shape, tiny)
        keep(result)
    return result


def rows_of(shape: Shape, tiny: bool, te: bool = False) -> list[dict[str, Any]]:
    """All ways of one layer."""
    mirror, rows = Mirror(shape), []
    x = gpu.batch(gpu.Size(shape.hidden, 64 if tiny else TOKENS), 1)
    with mirror.installed():
        layer = layer_of(shape, mirror, te)
        ours = {name: PipelinedMoE([plan]) for name, plan in WAYS.items()}
        ways = {name: functools.partial(once, layer, ours[name], name, x) for name in WAYS}
        gpu.alternate(ways, 2)
        peaks = {name: _peak(way, ours[name]) for name, way in ways.items()}
        for name, (times, clock) in gpu.alternate(ways, 2 if tiny else gpu.ROUNDS).items():
            ms = gpu.spread(times, 3)
            speed = round(rows[0]["ms"][0] / ms[0], 3) if rows else 1.0
            rows.append({"layer": shape.name, "way": name, "ms": ms, "speed": speed,
                         "peak_bytes": peaks[name], **clock})  # fmt: skip
            print(rows[-1], flush=True)
        for one in ours.values():
            one.close()
    del layer, ways
    gpu.release()
    return rows


def once(layer: Any, ours: PipelinedMoE, name: str, x: torch.Tensor, calls: int = 1) -> float:
    """Milliseconds of forward and backward; of several calls all forward passes come first."""
    layer.moe_layer_recompute = "recompute" in name
    with gpu.hooked(ours.hooks()):
        gpu.synchronize()
        started = time.perf_counter()
        outs = [layer(x.detach().requires_grad_(True))[0] for _ in range(calls)]
        while outs:
            out = outs.pop()
            out.backward(torch.ones_like(out))
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.main_grad.add_(parameter.grad)
                    parameter.grad = None
        gpu.synchronize()
        return 1e3 * (time.perf_counter() - started)


def _peak(way: Any, ours: PipelinedMoE) -> int:
    """Most bytes at once beside parameters and gradients, with two calls in flight."""
    gpu.release()
    way(calls=2)
    if not gpu.CUDA:
        return 0
    resting = torch.cuda.memory_allocated() - (ours.memory.ring.nbytes if ours.memory else 0)
    torch.cuda.reset_peak_memory_stats()
    way(calls=2)
    return torch.cuda.max_memory_allocated() - resting


if __name__ == "__main__":
    gpu.main(run)
