"""(e) MoE layers: Megatron's own, that with --recompute-modules moe, ours in chunks.

    python -m benchmarks.gpu.run --parts moe
    torchrun --nproc-per-node 8 -m benchmarks.gpu.moe [--tiny] [--shapes 0,1]

Layers of models that people train (``SHAPES``), with grouped products and fused
permutation where Transformer Engine is installed, top 8, balanced routing, real messages by NCCL
where there is more than one process. One process stands for all ranks of its expert-parallel group:
the others are its mirror images, which send it what it sends itself; an all-to-all is a copy on a
stream of its own and a wait there, as long as the rates below make it, one after the
other. The wait takes one multiprocessor where NCCL takes 16 and more, so what messages take from
computation is seen with several processes only. ``auto`` is timed in training, not here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import package_info
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.gpu import model
from benchmarks.gpu.model import CUDA, release, start, synchronize
from megatron_ext.integration.features.moe.layer import PipelinedMoE
from megatron_ext.integration.hooks import Hooks
from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy

TE = CUDA and importlib.util.find_spec("transformer_engine") is not None
ROUNDS, IN_FLIGHT = 5, 2
RECOMPUTE = "recompute"  # --recompute-modules moe
TOKENS = 4096  # of a rank in a call
NETWORK, PEER, NODE = 42e9, 330e9, 8  # bytes/s of a device between nodes, in one; its devices
OURS = [LayerPlan(2), LayerPlan(4)]
OURS += [LayerPlan(4, one) for one in Strategy if one is not Strategy.NONE]
OURS += [LayerPlan(2, Strategy.S4), LayerPlan(8, Strategy.S4)]


class Shape(NamedTuple):
    """One layer on one rank, bf16, SwiGLU, tokens spread evenly over experts.

    Attributes:
        hidden, ffn, experts, top_k: of the model. ranks: that its experts are spread over.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    ranks: int

    @property
    def seconds_per_byte(self) -> float:
        """Of an all-to-all: to other nodes and in the node at once."""
        near = min(self.ranks, NODE)
        return max((self.ranks - near) / NETWORK, (near - 1) / PEER) / self.ranks


SHAPES = (
    Shape("DeepSeek-V3, EP 64", 7168, 2048, 256, 8, 64),
    Shape("Qwen3-235B, EP 32", 4096, 1536, 128, 8, 32),
    Shape("Qwen3-30B, EP 16", 2048, 768, 128, 8, 16),
    Shape("Mixtral 8x7B, EP 8", 4096, 14336, 8, 2, 8),
    Shape("DeepSeek-V3, EP 8", 7168, 2048, 256, 8, 8),
)


class MirrorGroup:
    """In place of a process group, where one process stands for all ``ranks``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        """So many mirror images."""
        return self._ranks

    @staticmethod
    def rank() -> int:
        """The first."""
        return 0


class Mirror:
    """Collectives on a ``MirrorGroup``; others are torch's.

    Attributes:
        seconds_per_byte: of what one rank sends.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        # High, as training gives the messages of experts.
        self._stream = torch.cuda.Stream(priority=-1) if CUDA else None
        self._free = 0.0
        self._cycles_per_second = _cycles() if CUDA else 0.0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, torch.distributed knows mirror groups."""
        from megatron.core.tensor_parallel import mappings

        mine = {
            "get_world_size": lambda group: group.size(),
            "get_rank": lambda group: group.rank(),
            "all_reduce": lambda tensor, *args, group, **kwargs: None,
            "all_gather_into_tensor": self.all_gather_into_tensor,
            "all_to_all_single": self.all_to_all_single,
        }
        with contextlib.ExitStack() as stack:
            for name, ours in mine.items():
                both = _either(ours, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, both))
            stack.enter_context(
                mock.patch.object(mappings, "dist_all_gather_func", dist.all_gather_into_tensor)
            )
            yield

    @staticmethod
    def all_gather_into_tensor(
        out: torch.Tensor, own: torch.Tensor, group: MirrorGroup, async_op: bool = False
    ) -> Any:
        """They all have the same."""
        out.copy_(own.repeat(group.size(), *[1] * (own.dim() - 1)).view_as(out))
        return _Sleeping(0.0) if async_op else None

    def all_to_all_single(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Fill ``out`` with as much; over when the network would be."""
        seconds = rows.numel() * rows.element_size() * self.seconds_per_byte
        if self._stream is None:
            _fill(out, rows)
            self._free = max(time.perf_counter(), self._free) + seconds
            work: Any = _Sleeping(self._free)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _fill(out, rows)
                if seconds:
                    torch.cuda._sleep(int(seconds * self._cycles_per_second))
            done = torch.cuda.Event()
            done.record(self._stream)
            work = _Recorded(done)
        return work if async_op else work.wait()


def _either(ours: Any, torchs: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, kwargs.get("group")]
        one = next((x for x in given if isinstance(x, MirrorGroup)), None)
        if one is None:
            return torchs(*args, **kwargs)
        positional = [x for x in args if x is not one]
        return ours(*positional, **{**kwargs, "group": one})

    return call


class _Sleeping:
    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        """The host waits."""
        time.sleep(max(0.0, self._end - time.perf_counter()))


class _Recorded:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """The stream waits."""
        torch.cuda.current_stream().wait_event(self._event)


def _fill(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Numbers that are no rubbish."""
    least = min(len(out), len(rows))
    out[:least].copy_(rows[:least])
    if least and len(out) > least:
        extra = torch.arange(len(out) - least, device=out.device) % least
        out[least:].copy_(rows.index_select(0, extra))


def _cycles() -> float:
    """How many of ``_sleep``'s cycles make a second."""
    torch.cuda._sleep(1_000_000)
    synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(200_000_000)
    synchronize()
    return 200_000_000 / (time.perf_counter() - started)


class Bench:
    """One layer under one plan after the other."""

    def __init__(self, layer: Any, x: torch.Tensor) -> None:
        self.layer, self.x = layer, x
        self._ours: dict[str, PipelinedMoE] = {}

    def add(self, name: str, plan: LayerPlan) -> None:
        """Later, ``run(name)``."""
        self._ours[name] = PipelinedMoE([plan])

    def run(self, name: str, in_flight: int = 1) -> float:
        """Milliseconds of forward and backward, on the slowest rank.

        Args:
            in_flight: calls, all forward passes before the first backward pass.
        """
        hooks = Hooks(package_info.__version__)
        hooks.apply(self._ours[name].hooks())
        self.layer.moe_layer_recompute = name == RECOMPUTE
        given = [self.x.clone().requires_grad_() for _ in range(in_flight)]
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        found = [self.layer(x)[0] for x in given]
        while found:
            y = found.pop()
            y.backward(torch.ones_like(y))
        synchronize()
        slowest = torch.tensor([time.perf_counter() - started], device=self.x.device)
        hooks.revert()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest) * 1e3

    def peak_bytes(self, name: str) -> int | None:
        """Most bytes at once beside parameters, gradients and input; None without a GPU."""
        release()
        self.run(name, IN_FLIGHT)
        if not CUDA:
            return None
        memory = self._ours[name].memory
        ring = 0 if memory is None else memory.ring.nbytes
        resting = torch.cuda.memory_allocated() - ring
        torch.cuda.reset_peak_memory_stats()
        self.run(name, IN_FLIGHT)
        return torch.cuda.max_memory_allocated() - resting

    def close(self) -> None:
        """Release all buffers."""
        for ours in self._ours.values():
            ours.close()


def layer_of(shape: Shape, groups: Any) -> Any:
    """Megatron's layer with this rank's experts, in bf16."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    dtype = torch.bfloat16
    config = TransformerConfig(
        num_layers=1, num_attention_heads=2, hidden_size=shape.hidden,
        moe_ffn_hidden_size=shape.ffn, num_moe_experts=shape.experts, moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
        expert_model_parallel_size=groups.ep.size(), moe_grouped_gemm=TE, moe_permute_fusion=TE,
        use_cpu_initialization=not CUDA, params_dtype=dtype, bf16=True,
    )  # fmt: skip
    spec = get_moe_module_spec(TE, shape.experts, moe_grouped_gemm=TE)
    given = {"config": config, "pg_collection": groups}
    layer = build_module(spec, **given) if hasattr(spec, "module") else spec(**given)
    layer.set_layer_number(1)
    layer = layer.to(model.DEVICE).to(dtype)
    for parameter in layer.parameters():
        # As data parallelism gives it: chunks add to it, in place of a sum of their own.
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return layer


def measure(shape: Shape, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """All ways of one shape, in turn."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    mirror = None
    if dist.get_world_size() == 1:
        mirror = Mirror()
        mirror.seconds_per_byte = shape.seconds_per_byte
        groups.ep = groups.tp_ep = MirrorGroup(shape.ranks)
    rows = []
    with mirror.installed() if mirror is not None else contextlib.nullcontext():
        x = torch.randn(tokens, 1, shape.hidden, device=model.DEVICE).to(torch.bfloat16)
        bench = Bench(layer_of(shape, groups), x)
        plans = dict.fromkeys(("stock", RECOMPUTE), STOCK) | {str(plan): plan for plan in OURS}
        for name, plan in plans.items():
            bench.add(name, plan)
            for _ in range(2):
                bench.run(name)
            ms = statistics.median(bench.run(name) for _ in range(rounds))
            row = {"shape": shape.name, "way": name, "chunks": plan.chunks,
                   "strategy": plan.strategy.value, "ms": ms,
                   "peak_bytes": bench.peak_bytes(name)}  # fmt: skip
            rows.append(row)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
        bench.close()
    release()
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All shapes, each with the peak bytes and times of all ways."""
    if not dist.is_initialized():
        start()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    world = dist.get_world_size()
    tokens = 64 if args.tiny else TOKENS
    found: list[dict[str, Any]] = []
    about = {"rows": found, "tokens": tokens, "ranks": world, "grouped": TE}
    numbers = getattr(args, "shapes", None) or range(len(SHAPES))
    for shape in [SHAPES[i] for i in numbers][: 1 if args.tiny else None]:
        one = shape._replace(hidden=64, ffn=32, experts=16, ranks=8) if args.tiny else shape
        found += measure(one, tokens, 1 if args.tiny else ROUNDS)
        if hasattr(args, "keep"):
            args.keep(about | {"unfinished": "more shapes"})
    return about


def main() -> None:
    """One of several processes, each with a GPU of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tiny", action="store_true", help="next to nothing, also on the CPU")
    parser.add_argument("--shapes", type=lambda text: [int(one) for one in text.split(",")])
    args = parser.parse_args()
    from megatron.core import parallel_state

    if CUDA:
        model.DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(model.DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
