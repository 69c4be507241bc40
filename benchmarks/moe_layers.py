"""One MoE layer under one policy after the other, for benchmarks/moe.py."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import package_info
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.moe_emulated import EXPERTS, FFN, HIDDEN, IN_FLIGHT, TOP_K, Peak
from megatron_ext.integration.features.moe.choice import ChosenMoE
from megatron_ext.integration.features.moe.layer import FixedPolicy, PipelinedMoE
from megatron_ext.integration.hooks import Hooks
from megatron_ext.moe.autotune import SearchSpace, Tuner
from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.plan import LayerPlan
from megatron_ext.offload.device import CpuDevice, Direction


class Auto(ChosenMoE):
    """The policy of the flags for one layer with microbatches in flight, without Megatron's
    arguments; notes its log."""

    def __init__(self, space: SearchSpace, budget: int | None = None) -> None:
        super().__init__(space, budget, lambda chunks, microbatches: [IN_FLIGHT])
        self.lines: list[str] = []
        atexit.unregister(self.close)

    def _log(self, text: str) -> None:
        self.lines.append(text)

    def _in_flight(self) -> int:
        return IN_FLIGHT

    @property
    def tuner(self) -> Tuner:
        """Of the layer, after a first call."""
        (kind,) = self._kinds.values()
        return kind.tuner


def build(world: int, te: bool = False, groups: Any = None, /, **changed: Any) -> Any:
    """Megatron's MoE layer, experts spread over ``world`` ranks.

    Args:
        te: of Transformer Engine's modules, experts as one.
        groups: a ``ProcessGroupCollection``; None: Megatron's.
        changed: other options of its configuration.
    """
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": TOP_K,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": True,  # random, so nearly even
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "expert_model_parallel_size": world,
    }
    config = TransformerConfig(**{**options, **changed})
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts).submodules.mlp
    if te:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

        spec = get_moe_module_spec(True, config.num_moe_experts, moe_grouped_gemm=True)
    given = {"config": config, **({} if groups is None else {"pg_collection": groups})}
    layer = build_module(spec, **given) if hasattr(spec, "module") else spec(**given)
    layer.set_layer_number(1)
    return layer


class Bench:
    """One layer under one policy after the other."""

    def __init__(self, layer: Any, x: torch.Tensor, link: float | None = None) -> None:
        """``link``: bytes/s to the host and back."""
        self.layer, self.x, self._link = layer, x, link
        self.ours: dict[str, PipelinedMoE] = {}
        self._recompute: set[str] = set()

    def add(self, name: str, policy: FixedPolicy, *, recompute: bool = False) -> None:
        """Later, ``run(name)``; ``recompute`` is ``--recompute-modules moe``."""
        policy.built(self.layer)
        if recompute:
            self._recompute.add(name)
        self.ours[name] = ours = PipelinedMoE(policy)
        ours.memory = self.memory()

    def synchronize(self) -> None:
        """Wait for the device; for the CPU nobody has to."""

    def memory(self) -> Memory | None:
        """Of one way; None: the device's own."""
        rates = None if self._link is None else dict.fromkeys(Direction, self._link)
        return Memory(CpuDevice(throttle_bytes_per_second=rates), min_bytes=1)

    @contextlib.contextmanager
    def under(self, name: str) -> Iterator[None]:
        """Inside, the layer runs like that."""
        hooks = Hooks(package_info.__version__)
        hooks.apply(self.ours[name].hooks())
        self.layer.moe_layer_recompute = name in self._recompute
        try:
            yield
        finally:
            hooks.revert()

    def run(self, name: str, in_flight: int = 1) -> float:
        """Milliseconds of forward and backward, on the slowest rank.

        Args:
            in_flight: calls, all forward passes before the first backward pass.
        """
        with self.under(name):
            given = [self.x.clone().requires_grad_() for _ in range(in_flight)]
            dist.barrier()
            self.synchronize()
            started = time.perf_counter()
            found = [self.layer(x)[0] for x in given]
            while found:
                y = found.pop()
                y.backward(torch.ones_like(y))
            self.synchronize()
            took = time.perf_counter() - started
        slowest = torch.tensor([took], device=self.x.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest) * 1e3

    def peak(self, name: str, in_flight: int = 1) -> tuple[int, int, int]:
        """Most bytes at once beside parameters and gradients, of them shared buffers, and bytes on
        the host; arguments as of ``run``. Of the rank that needs most."""
        ours = self.ours[name]
        nbytes = -1
        while ours.memory is not None and nbytes != ours.memory.ring.nbytes:
            nbytes = ours.memory.ring.nbytes  # random routing may need larger buffers
            for _ in range(3):
                self.run(name, in_flight)
        known = {t.untyped_storage()._cdata for t in self.layer.parameters()}
        kept = host = 0
        if ours.memory is not None:
            ring, arena = ours.memory.ring, ours.memory.engine.arena
            kept, host = ring.nbytes, arena.peak_bytes
            known |= ring.storages()
            known |= {one.memory.untyped_storage()._cdata for one in arena._regions}
        self.layer.zero_grad(set_to_none=False)
        with Peak(known) as peak:
            self.run(name, in_flight)
        found = torch.tensor([peak.nbytes + kept])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found), kept, host

    def close(self) -> None:
        """End threads."""
        for ours in self.ours.values():
            ours.close()


def settle(bench: Bench, auto: Auto, name: str = "auto") -> int:
    """Train until nothing is tried any more; the steps, of four calls each, that this took."""
    for step in range(1, 200):
        auto.begin_step(IN_FLIGHT)
        for _ in range(4):
            bench.run(name)
        if not auto.tuner.on_trial:
            return step
    raise RuntimeError("the search did not end in 200 steps")


def name_of(plan: LayerPlan) -> str:
    """As in the tables: chunks, strategy, lookahead."""
    if plan.stock:
        return "stock"
    return f"{plan.chunks} {plan.strategy.value} {min(plan.lookahead, plan.chunks)}"
