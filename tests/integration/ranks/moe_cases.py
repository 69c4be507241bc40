"""MoE layers of megatron-core, stock and in chunks, on gloo ranks; see test_moe.

    python moe_cases.py RESULT.pickle [CASE ...]

Forks ranks once for each case, as gpt_cases does. A case builds one of Megatron's own MoE layers
and runs it in several ways on the same weights and data; RESULT maps a case to what its ranks
found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from megatron_ext import cpu  # noqa: E402

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import package_info, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ext.integration.moe import PipelinedMoE  # noqa: E402
from megatron_ext.integration.seams import Seams  # noqa: E402
from megatron_ext.moe.settings import Settings  # noqa: E402

HIDDEN, FFN, EXPERTS, SEQUENCE, BATCH = 24, 40, 8, 13, 2
STRATEGIES = ("none", "s1", "s2", "s3", "s4")


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration of the layer in ``case``."""
    dtype = case.get("dtype", torch.float32)
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": case.get("tp", 1),
        "sequence_parallel": case.get("tp", 1) > 1,
        "expert_model_parallel_size": case.get("ep", 2),
        "expert_tensor_parallel_size": case.get("etp", 1),
    }
    if dtype is torch.float64:
        options["moe_router_dtype"] = "fp64"
    return TransformerConfig(**{**options, **case.get("config", {})})


def build(config: TransformerConfig) -> Any:
    """The MoE layer, with weights that depend on their global names only."""
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=config.moe_grouped_gemm
    ).submodules.mlp
    layer = build_module(spec, config=config) if hasattr(spec, "module") else spec(config=config)
    layer.set_layer_number(1)
    first = layer.local_expert_indices[0]
    tp = parallel_state.get_expert_tensor_parallel_rank()
    for name, parameter in layer.named_parameters():
        parts = name.split(".")
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + first)
            parts.append(f"tp{tp}")
        seed = int.from_bytes(hashlib.sha256(".".join(parts).encode()).digest()[:7], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values * (1.0 if "router" in name else 0.3))
    return layer.to(config.params_dtype)


def data(case: dict[str, Any], config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of this rank, (sequence, batch, hidden)."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    shape = (case.get("sequence", SEQUENCE), BATCH, HIDDEN)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.get("skew"):
        x = x.abs()  # with a router that likes positive numbers, all tokens go to one rank
    return x.to(config.params_dtype), dy.to(config.params_dtype)


class Traced:
    """Notes every collective of a group inside the context: (name, bytes of the group's ranks)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __enter__(self) -> Traced:
        self._original = dist.all_to_all_single, dist.all_gather_into_tensor
        dist.all_to_all_single = self._noting("all-to-all", dist.all_to_all_single)
        dist.all_gather_into_tensor = self._noting("all-gather", dist.all_gather_into_tensor)
        return self

    def __exit__(self, *unused: object) -> None:
        dist.all_to_all_single, dist.all_gather_into_tensor = self._original

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            total = torch.tensor([given.numel() * given.element_size()])
            dist.all_reduce(total)
            self.calls.append((name, int(total), dist.get_world_size(kwargs.get("group"))))
            return original(out, given, *args, **kwargs)

        return call


def run_layer(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward pass; output and all gradients."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy)
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: None if t is None else t.clone() for name, t in found.items()}


def compare(case: dict[str, Any], ways: Any) -> dict[str, Any]:
    """Stock, then each (chunks, strategy) of ``ways``."""
    config = config_of(case)
    layer = build(config)
    x, dy = data(case, config)
    if case.get("skew"):
        layer.router.weight.data.fill_(-1.0).abs_()
        layer.router.weight.data[2:] *= -1.0
    results: dict[Any, Any] = {"stock": run_layer(layer, x, dy)}
    settings = Settings()
    ours = PipelinedMoE(settings, min_bytes=1)
    seams = Seams(package_info.__version__)
    seams.apply(ours.seams())
    try:
        for chunks, strategy in ways:
            settings.set(chunks, strategy)
            with Traced() as traced:
                results[chunks, strategy] = run_layer(layer, x, dy)
            results["trace", chunks, strategy] = traced.calls
    finally:
        seams.revert()
        ours.release()
    return results


WAYS = [(n, strategy) for n in (1, 2, 4) for strategy in STRATEGIES]

# name -> world, parallel sizes, and what differs.
CASES: dict[str, dict[str, Any]] = {
    "ep2-fp64": {"world": 2, "ep": 2, "dtype": torch.float64},
    "ep2-fp32": {"world": 2, "ep": 2},
    "ep2-bf16": {"world": 2, "ep": 2, "dtype": torch.bfloat16},
    "ep4-fp32": {"world": 4, "ep": 4},
}


def rank_main(rank: int, folder: Path, name: str, case: dict[str, Any]) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    own = folder / name
    own.mkdir(exist_ok=True, parents=True)
    world = case["world"]
    dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tp", 1),
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case.get("etp", 1),
    )
    model_parallel_cuda_manual_seed(1)
    run = case.get("run", lambda case: compare(case, case.get("ways", WAYS)))
    mine = run(case)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    if rank == 0:
        print(f"{name}: done", flush=True)
        (folder / "result.pickle").write_bytes(pickle.dumps(every))
    dist.barrier()


def run_on_ranks(folder: Path, name: str, case: dict[str, Any]) -> bool:
    """Fork the ranks of one case; true if all of them ended well."""
    children = []
    for rank in range(case["world"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rank_main(rank, folder, name, case)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(pid)
    good = True
    for _ in children:
        _, status = os.wait()
        if status != 0 and good:
            good = False
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 15)
    return good


def main() -> int:
    """Run the cases that are named, or all; exit status 0 only if all of them ended well."""
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, case in CASES.items():
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            if not run_on_ranks(folder, name, case):
                return 1
            results[name] = pickle.loads((folder / "result.pickle").read_bytes())
    Path(sys.argv[1]).write_bytes(pickle.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
