"""Run Megatron's MoE layers in chunks of tokens, equal to the same layers run at once.

    torchrun --nproc-per-node 2 examples/moe_chunks.py

Each rank has half of the experts. In chunks, the all-to-alls of one chunk can run beside the
experts of another; with reuse s4, what backward needs of a chunk is sent and computed again, in
buffers that all layers share. On CPU ranks nothing gets faster: numbers and memory are shown here.
"""

from typing import Any

import tiny  # before Megatron: it prepares the CPU
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_ext

LAYERS, EXPERTS, HIDDEN, TOKENS = 4, 4, 64, 512
BOUND = 1e-12  # of float64 numbers, relative to the largest of a tensor


def build() -> torch.nn.ModuleList:
    """MoE layers with weights that are the same in every call; this rank's experts of each."""
    torch.manual_seed(1 + parallel_state.get_expert_model_parallel_rank())
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=2 * HIDDEN,
        moe_router_topk=2,
        moe_router_dtype="fp64",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        params_dtype=torch.float64,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    mlp = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    layers = torch.nn.ModuleList(mlp(config=config) for _ in range(LAYERS))
    for number, layer in enumerate(layers):
        layer.set_layer_number(number + 1)
        torch.distributed.broadcast(layer.router.weight.data, 0)
    return layers.double()


class Allocated(TorchDispatchMode):
    """Notes every tensor's memory that is made inside; ``held`` is what is left of it, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        results = function(*args, **(kwargs or {}))
        for value in results if isinstance(results, tuple | list) else [results]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    @property
    def held(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


def step(layers: torch.nn.ModuleList) -> tuple[tiny.Tensors, int]:
    """One forward and backward pass.

    Returns:
        output, gradient of the input, gradients of all weights; bytes that forward left
        allocated for it.
    """
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    x, dy = torch.randn(2, TOKENS, 1, HIDDEN, generator=draw, dtype=torch.float64)
    x.requires_grad_()
    layers.zero_grad()
    with Allocated() as memory:
        y = x
        for layer in layers:
            y = y + layer(y)[0]
    held = memory.held
    y.backward(dy)
    gradients = {name: p.grad for name, p in layers.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients}, held


def run(**options: Any) -> tuple[tiny.Tensors, int]:
    """A step with MoE layers as ``options`` say; without any, as Megatron runs them."""
    if options:
        megatron_ext.enable(**options)  # no schedule: Megatron's own runs
    found = step(build())
    megatron_ext.disable()
    return found


def main() -> None:
    """Megatron's layers, and ours in 1 and in 4 chunks."""
    tiny.start(pp=1, experts=2)
    at_once, at_once_bytes = run()
    ours, _ = run(moe_pipeline_chunks=1, moe_memory_reuse="s4")
    tiny.require_equal("one chunk, restored for backward", ours, at_once)
    for reuse in ("none", "s4"):
        ours, kept = run(moe_pipeline_chunks=4, moe_memory_reuse=reuse)
        errors = [float((ours[n] - at_once[n]).abs().max() / at_once[n].abs().max()) for n in ours]
        worst = max(tiny.everywhere(max(errors)))
        tiny.require(
            f"4 chunks, memory reuse {reuse}: output and {len(ours) - 1} gradients within "
            f"{worst:.1e} of the layers run at once (bound {BOUND:g})",
            worst <= BOUND,
        )
        held, restored = (tiny.everywhere(n / 2**20) for n in (at_once_bytes, kept))
        for rank, (before, now) in enumerate(zip(held, restored)):
            text = f"rank {rank} keeps {now:.1f} MiB for backward; run at once, {before:.1f}"
            tiny.require(text, reuse != "s4" or now < before / 2)
    tiny.finish()


if __name__ == "__main__":
    main()
