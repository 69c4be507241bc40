"""One transformer layer with and without cheap recompute; see test_recompute.

For each kind of layer: the bytes that autograd keeps after its forward pass, item by item, and
how far the gradients are from those without recompute (0: bit for bit the same), with B and W in
one pass, as two with another forward between them, and with what is kept moved to the host and
back.
"""

# ruff: noqa: E402

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.integration import split_local as wgrad
from megatron_ext.integration.features import recompute
from megatron_ext.integration.hooks import Hooks
from megatron_ext.integration.versions import megatron_version
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.device import CpuDevice
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from megatron_ext.runtime.wgrad import WeightGradStore
from tests.support.case_server import serve

S, B, H, HEADS = 16, 2, 64, 4
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
KINDS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gelu fused": {"bias_activation_fusion": True},
    "gelu bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "swiglu": {**GATED, "add_bias_linear": False},
    "swiglu fused": {**GATED, "add_bias_linear": False, "bias_activation_fusion": True},
    "rmsnorm": {**GATED, "add_bias_linear": False, "normalization": "RMSNorm"},
    "rmsnorm bf16": {
        **GATED,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "bf16": True,
        "params_dtype": torch.bfloat16,
    },
    "squared relu": {"activation_func": squared_relu, "add_bias_linear": False},
    "dropout": {"hidden_dropout": 0.1},
    "experts": {**EXPERTS, **GATED, "add_bias_linear": False},
    # Without bias: Megatron cannot recompute an MLP that returns one.
    "mlp too": {"recompute_modules": ["mlp"], "add_bias_linear": False},
    "frozen fc1": {},
}


def config_of(kind: str, modules: list[str]) -> TransformerConfig:
    """The configuration of one kind of layer, with ``modules`` recomputed by Megatron."""
    changed = dict(KINDS[kind])
    modules = [*changed.pop("recompute_modules", []), *modules]
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": H,
            "num_attention_heads": HEADS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "recompute_granularity": "selective" if modules else None,
            "recompute_modules": modules or None,
            **changed,
        }
    )


class Layer:
    """A layer, and what a pass of it keeps and gives."""

    def __init__(self, kind: str, modules: list[str]) -> None:
        config = config_of(kind, modules)
        experts = config.num_moe_experts
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        spec = get_gpt_layer_local_spec(num_experts=experts, normalization=config.normalization)
        self.module = build_module(spec, config=config)
        if kind == "frozen fc1":
            for parameter in self.module.mlp.linear_fc1.parameters():
                parameter.requires_grad_(False)
        self.dtype = config.params_dtype
        self.mask = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)

    def forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output of one microbatch."""
        torch.manual_seed(100 + number)
        x = torch.randn(S, B, H).to(self.dtype).requires_grad_(True)
        return x, self.module(x, self.mask)[0]

    def kept(self) -> Counter[str]:
        """Bytes of the storages, parameters apart, that autograd keeps after a forward pass."""
        parameters = {p.untyped_storage()._cdata for p in self.module.parameters()}
        found: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                found[storage._cdata] = storage, tensor.shape, tensor.dtype
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _, y = self.forward(0)
        items: Counter[str] = Counter()
        for storage, shape, dtype in found.values():
            items[f"{tuple(shape)} {dtype}".replace("torch.", "")] += storage.nbytes()
        y.float().sum().backward()
        self.module.zero_grad()
        return +items

    def gradients(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """All gradients, and forget them."""
        found = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        assert x.grad is not None
        self.module.zero_grad()
        return {**found, "input": x.grad}


def fused(layer: Layer) -> dict[str, torch.Tensor]:
    """Forward, and B and W in one pass."""
    x, y = layer.forward(1)
    y.float().square().sum().backward()
    return layer.gradients(x)


def split(layer: Layer, store: WeightGradStore) -> dict[str, torch.Tensor]:
    """F F B F W, so that memory freed by B would have been used again before W."""
    x, y = layer.forward(1)
    _, other = layer.forward(2)
    with store.collect("1"):
        y.float().square().sum().backward()
    del y
    junk = [layer.forward(3)[1], torch.full((64, S, B, H), float("nan"))]
    store.run("1")
    del other, junk
    return layer.gradients(x)


def moved(layer: Layer, offload: ActivationStore) -> dict[str, Any]:
    """Forward and backward, what is kept on the host meanwhile."""
    with offload.saving("1"):
        x, y = layer.forward(1)
    offload.offload("1")
    offload.release("1")
    junk = layer.forward(3)[1]
    offload.prepare("1")
    offload.reload("1")
    y.float().square().sum().backward()
    del junk
    offload.finish("1")
    return layer.gradients(x)


@contextmanager
def hooked(hooks: Any) -> Iterator[None]:
    """Hooks in force."""
    bound = Hooks(megatron_version())
    bound.apply(hooks)
    try:
        yield
    finally:
        bound.revert()


def distance(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest number of its gradient. All are there, and mean
    something."""
    assert set(ours) == set(stock)
    # Comparing tells nothing of a NaN, and memory that was used again is full of them.
    assert all(bool(g.isfinite().all()) for g in (*ours.values(), *stock.values()))
    scales = {n: float(g.abs().max()) or 1.0 for n, g in stock.items()}
    return max(float((ours[n] - g).abs().max()) / scales[n] for n, g in stock.items())


def run(kind: str, offload: ActivationStore) -> dict[str, Any]:
    """One kind of layer."""
    store = WeightGradStore()
    plain = Layer(kind, [])
    stock, kept = fused(plain), plain.kept()
    with hooked(recompute.Recompute().hooks()):
        ours = Layer(kind, ["layernorm"])
        out: dict[str, Any] = {"kept": kept, "cheap": ours.kept()}
        out["fused"] = distance(fused(ours), stock)
        ours.module.eval()
        plain.module.eval()
        with torch.no_grad():
            outputs = ({"output": layer.forward(1)[1]} for layer in (ours, plain))
            out["evaluation"] = distance(*outputs)
        ours.module.train()
        out["moved"] = distance(moved(ours, offload), stock)
        with hooked(wgrad.hooks(store)):
            out["split"] = distance(split(Layer(kind, ["layernorm"]), store), stock)
    return out


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One kind of layer; the result has what went to the host and back, too."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    parallel_state.initialize_model_parallel()
    device = CpuDevice()
    engine = Engine(device, HostArena(device.torch_device, 0, 1))
    found = run(name, ActivationStore(engine, min_bytes=1024))
    found["moved_bytes"] = engine.counters.bytes_to_host
    engine.close()
    (folder / "result.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    serve(KINDS, rank_main, 1)
