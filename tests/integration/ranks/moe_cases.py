"""MoE layers of megatron-core, stock and in chunks, on gloo ranks; see test_moe.

    python moe_cases.py RESULT.pickle [CASE ...]

Forks ranks once for each case, as gpt_cases does. A case builds one of Megatron's own MoE layers
and runs it in several ways on the same weights and data; RESULT maps a case to what its ranks
found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from megatron_ext import cpu  # noqa: E402

cpu.install()

import torch  # noqa: E402


def _wgrad_gemm(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(grad_output.t().matmul(x))


# Before Megatron is imported: it looks once whether Apex's kernel is there.
kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
kernels.wgrad_gemm_accum_fp32 = kernels.wgrad_gemm_accum_fp16 = _wgrad_gemm  # type: ignore[attr-defined]
sys.modules[kernels.__name__] = kernels

import torch.distributed as dist  # noqa: E402
from megatron.core import package_info, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from megatron_ext.integration.moe import PipelinedMoE  # noqa: E402
from megatron_ext.integration.seams import Seams  # noqa: E402
from megatron_ext.moe.exchange import Exchange  # noqa: E402
from megatron_ext.moe.region import Region  # noqa: E402
from megatron_ext.moe.saved import Record  # noqa: E402
from megatron_ext.moe.settings import Settings  # noqa: E402

HIDDEN, FFN, EXPERTS, SEQUENCE, BATCH = 24, 40, 8, 13, 2
STRATEGIES = ("none", "s1", "s2", "s3", "s4")


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration of the layer in ``case``."""
    dtype = case.get("dtype", torch.float32)
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": case.get("hidden", HIDDEN),
        "num_attention_heads": 2,
        "num_moe_experts": case.get("experts", EXPERTS),
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
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
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
    seed = 1000 * case.get("seed", 0) + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    sequence = case.get("sequence", SEQUENCE) + (5 * dist.get_rank() if case.get("uneven") else 0)
    shape = (sequence, BATCH, config.hidden_size)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.get("skew"):
        x = x.abs()  # with a router that likes positive numbers, all tokens go to one rank
    return x.to(config.params_dtype), dy.to(config.params_dtype)


@contextlib.contextmanager
def uneven_gather() -> Any:
    """Lets gloo gather and scatter rows of uneven sizes, as NCCL does for stock's expert-tensor
    parallelism: through all-to-alls."""

    def all_gather(outs: list[torch.Tensor], given: torch.Tensor, group: Any = None) -> None:
        if len({tuple(t.shape) for t in outs}) == 1:
            return original_gather(outs, given, group=group)
        out = given.new_empty((sum(len(t) for t in outs), *given.shape[1:]))
        every = torch.cat([given] * len(outs))
        sizes = [len(t) for t in outs]
        dist.all_to_all_single(out, every, sizes, [len(given)] * len(outs), group=group)
        for target, part in zip(outs, out.split(sizes)):
            target.copy_(part)

    def reduce_scatter(out: torch.Tensor, given: list[torch.Tensor], group: Any = None) -> None:
        parts = out.new_empty((len(given) * len(out), *out.shape[1:]))
        sizes = [len(t) for t in given]
        own = [len(out)] * len(given)
        dist.all_to_all_single(parts, torch.cat(given), own, sizes, group=group)
        out.copy_(sum(parts.split(own)))

    original_gather, original_scatter = dist.all_gather, dist.reduce_scatter
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
    try:
        yield
    finally:
        dist.all_gather, dist.reduce_scatter = original_gather, original_scatter


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


def aux_losses() -> dict[str, torch.Tensor]:
    """What Megatron has noted of auxiliary losses since the last call."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].clone() for name, entry in tracker.items()}
        tracker.clear()
    else:
        metrics = get_moe_metrics_tracker().metrics
        found = {name: entry.values.clone() for name, entry in metrics.items()}
        metrics.clear()
    return found


def run_layer(layer: Any, x: torch.Tensor, dy: torch.Tensor, padding: Any = None) -> dict[str, Any]:
    """Forward and backward pass; output, all gradients, statistics, and how often hooks fired."""
    layer.zero_grad(set_to_none=True)
    fired: dict[str, int] = {}
    handles = []
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:

            def count(unused: Any, name: str = name) -> None:
                fired[name] = fired.get(name, 0) + 1

            handles.append(parameter.register_post_accumulate_grad_hook(count))
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x, padding_mask=padding)
    y.backward(dy)
    for handle in handles:
        handle.remove()
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    if layer.router.enable_expert_bias:
        found["bias statistics"] = layer.router.local_tokens_per_expert.clone()
        layer.router.local_tokens_per_expert.zero_()
    found |= aux_losses()
    result: dict[str, Any] = {n: None if t is None else t.clone() for n, t in found.items()}
    return {**result, "fired": fired}


def shapes(layer: Any) -> dict[str, Any]:
    """Names and shapes of a state dict."""
    return {name: getattr(value, "shape", None) for name, value in layer.state_dict().items()}


@contextlib.contextmanager
def chunked(settings: Settings, **options: Any) -> Any:
    """Megatron's MoE layers as ``settings`` say."""
    ours = PipelinedMoE(settings, **options)
    seams = Seams(package_info.__version__)
    seams.apply(ours.seams())
    try:
        yield ours
    finally:
        seams.revert()
        ours.release()


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Stock, then each (chunks, strategy) of the case's ways."""
    config = config_of(case)
    layer = build(config)
    if case.get("frozen"):
        layer.experts.local_experts[0].requires_grad_(False)
    x, dy = data(case, config)
    if case.get("skew"):
        # All tokens of all ranks go to the experts 0 and 1, of the first rank.
        layer.router.weight.data.fill_(-1.0)
        layer.router.weight.data[:2] = 1.0
    padding = None
    if case.get("padding"):
        padding = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
        padding[:, -3:] = True
    results: dict[Any, Any] = {"stock": run_layer(layer, x, dy, padding)}
    before = shapes(layer)
    settings = Settings()
    with chunked(settings, min_bytes=1):
        for chunks, strategy in case.get("ways", WAYS):
            settings.set(chunks, strategy)
            with Traced() as traced:
                results[chunks, strategy] = run_layer(layer, x, dy, padding)
            results["trace", chunks, strategy] = traced.calls
        assert shapes(layer) == before
        settings.set(4, "none" if layer.moe_layer_recompute else "s1")
        with torch.no_grad():
            results["no_grad"] = layer(x, padding_mask=padding)[0]
    return results


class Two(torch.nn.Module):
    """Two layers behind each other, with residuals."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([build(config), build(config)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def counted(original: Callable[..., Any], counts: list[int], number: int) -> Callable[..., Any]:
    """``original``, counting its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[number] += 1
        return original(*args, **kwargs)

    return call


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Several steps of two microbatches under Megatron's data parallel reduction, which overlaps,
    with settings that change every step; stock, then ours."""
    steps = case["steps"]
    found: dict[str, Any] = {}
    for kind in ("stock", "ours"):
        config = config_of(case)
        module = Two(config)
        names = dict(module.named_parameters())
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not case.get("reduce_in_bf16"),
            overlap_grad_reduce=True,
            bucket_size=3000,
        )
        model = DistributedDataParallel(config, ddp, module)
        groups = model.bucket_groups + model.expert_parallel_bucket_groups
        reduced = [0] * len(groups)
        for number, group in enumerate(groups):
            group.start_grad_sync = counted(group.start_grad_sync, reduced, number)
        settings = Settings()
        with chunked(settings, min_bytes=1) as ours:
            for step, (chunks, strategy) in enumerate(steps):
                if kind == "ours":
                    settings.set(chunks, strategy)
                model.zero_grad_buffer()
                for microbatch in range(2):
                    x, dy = data({**case, "seed": 10 * step + microbatch}, config)
                    context = model.no_sync() if microbatch == 0 else contextlib.nullcontext()
                    with context:
                        model(x.requires_grad_()).backward(dy)
                before = list(reduced)
                model.finish_grad_sync()
                found[kind, step] = {n: p.main_grad.clone() for n, p in names.items()}
                found[kind, step, "reduced"] = before, list(reduced)
                reduced[:] = [0] * len(groups)
            added = [getattr(p, "grad_added_to_main_grad", False) for p in names.values()]
            found[kind, "fused"] = sum(added)
            if ours.memory is not None:
                found["arena used"] = ours.memory.engine.arena.used_bytes
    return found


def precision(case: dict[str, Any]) -> dict[str, Any]:
    """Root mean square errors of the experts' weight gradients in bf16, relative to fp64's."""
    config = config_of(case)
    layer = build(config)
    x, dy = data(case, config)
    exact = build(config_of({**case, "dtype": torch.float64}))
    for ours, theirs in zip(exact.parameters(), layer.parameters()):
        ours.data.copy_(theirs.data)
    reference = run_layer(exact, x.double(), dy.double())
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, layer)
    settings = Settings()
    found: dict[str, Any] = {}
    with chunked(settings):
        for way in case["ways"]:
            settings.set(*way)
            model.zero_grad_buffer()
            model(x.clone().requires_grad_())[0].backward(dy)
            errors = []
            for name, parameter in layer.named_parameters():
                if "experts" in name:
                    error = parameter.main_grad.double() - reference[name]
                    errors.append(float(error.square().mean().sqrt() / reference[name].std()))
            found[way] = sum(errors) / len(errors)
    return found


class Watched:
    """Notes, inside the context, what one forward pass of a layer keeps, parameters apart.

    Attributes:
        kept: storages that autograd keeps for the region, by identity.
        inside: storages that it wanted to keep for the experts, and their bytes.
        rows: (experts' rows, rows sent) of each chunk.
        worst: the plan's.
    """

    def __init__(self, layer: Any) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
        self.kept: dict[int, Any] = {}
        self.inside: dict[int, tuple[StorageWeakRef, int]] = {}
        self.rows: list[tuple[int, int]] = []
        self.worst: tuple[int, ...] = ()

    @contextlib.contextmanager
    def __call__(self) -> Any:
        call, pack, plan = Region.__call__, Record._pack, Exchange.plan

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._parameters:
                self.kept[storage._cdata] = storage
            return tensor

        def watched_call(region: Any, *args: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return call(region, *args)

        def watched_pack(record: Any, residents: Any, tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._parameters:
                self.inside[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return pack(record, residents, tensor)

        def watched_plan(exchange: Any, *args: Any) -> Any:
            made = plan(exchange, *args)
            self.rows = [(chunk.rows, chunk.sent_rows) for chunk in made.chunks]
            self.worst = dataclasses.astuple(made.worst)
            return made

        with mock.patch.object(Region, "__call__", watched_call):
            with mock.patch.object(Record, "_pack", watched_pack):
                with mock.patch.object(Exchange, "plan", watched_plan):
                    yield


def memory(case: dict[str, Any]) -> dict[str, Any]:
    """What each strategy keeps between forward and backward pass of one layer, in bytes by unique
    storage, parameters apart."""
    config = config_of(case)
    layer = build(config)
    x, dy = data(case, config)
    settings = Settings()
    found: dict[str, Any] = {}
    with chunked(settings, min_bytes=1) as ours:
        for way in case["ways"]:
            settings.set(*way)
            watched = Watched(layer)
            with watched():
                y, _ = layer(x.clone().requires_grad_())
            ours.memory.departures.flush()
            ring = {s.memory.untyped_storage()._cdata for s in ours.memory.ring._slots.values()}
            inside = [entry for cdata, entry in watched.inside.items() if cdata not in ring]
            found["worst", way] = watched.worst
            found[way] = {
                "kept": sum(storage.nbytes() for storage in watched.kept.values()),
                "alive inside": sum(n for ref, n in inside if not ref.expired()),
                "inside": sum(n for _, n in inside),
                "host": ours.memory.engine.arena.used_bytes,
                "rows": watched.rows,
            }
            watched.kept.clear()
            y.backward(dy)
            found[way]["host afterwards"] = ours.memory.engine.arena.used_bytes
            found[way]["ring"] = ours.memory.ring.nbytes
            ours.memory.ring.clear()
    return found


WAYS = [(n, strategy) for n in (1, 2, 4) for strategy in STRATEGIES]
SOME = [(1, "s4"), (3, "none"), (3, "s1"), (3, "s2"), (3, "s3"), (3, "s4")]
STEPS = [(1, "none"), (2, "s1"), (4, "s2"), (1, "s3"), (8, "s4"), (2, "none"), (4, "s1")]
_CAPACITY = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk": 3,
}
_ON_INPUT = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_apply_probs_on_input": True,
}

# name -> ranks, parallel sizes, and what differs.
CASES: dict[str, dict[str, Any]] = {
    "ep2-fp64": {"world": 2, "ep": 2, "dtype": torch.float64},
    "ep2-fp32": {"world": 2, "ep": 2},
    "ep2-bf16": {"world": 2, "ep": 2, "dtype": torch.bfloat16},
    "ep4-fp64": {"world": 4, "ep": 4, "dtype": torch.float64, "ways": SOME},
    "ep4-fp32": {"world": 4, "ep": 4},
    "ep1": {"world": 2, "ep": 1, "ways": SOME},
    "ep2-dp2": {"world": 4, "ep": 2, "ways": SOME},
    "one-expert-a-rank": {"world": 4, "ep": 4, "experts": 4, "ways": SOME},
    "tp2-ep2": {"world": 4, "tp": 2, "ep": 2, "ways": SOME},
    "etp2": {"world": 2, "tp": 2, "etp": 2, "ep": 1, "ways": SOME},
    "etp2-ep2": {"world": 4, "tp": 2, "etp": 2, "ep": 2, "ways": SOME},
    "capacity": {"world": 2, "ep": 2, "ways": SOME, "config": _CAPACITY},
    "expert-bias": {"world": 2, "ep": 2, "ways": SOME, "config": _BIAS},
    "shared-experts": {
        "world": 2,
        "ep": 2,
        "ways": SOME,
        "config": {"moe_shared_expert_intermediate_size": 32},
    },
    "probs-on-input": {"world": 2, "ep": 2, "ways": SOME, "config": _ON_INPUT},
    "relu": {
        "world": 2,
        "ep": 2,
        "ways": SOME,
        "config": {"gated_linear_unit": False, "activation_func": torch.nn.functional.relu},
    },
    "odd-width": {"world": 2, "ep": 2, "ways": SOME, "hidden": 10},
    "router-fp32": {
        "world": 2,
        "ep": 2,
        "dtype": torch.bfloat16,
        "ways": SOME,
        "config": {"moe_router_dtype": "fp32"},
    },
    "skew": {"world": 4, "ep": 4, "skew": True, "ways": SOME},
    "few-tokens": {"world": 4, "ep": 4, "sequence": 1, "ways": [(8, s) for s in STRATEGIES]},
    "uneven-tokens": {"world": 4, "ep": 4, "uneven": True, "ways": SOME},
    "padding": {"world": 2, "ep": 2, "padding": True, "ways": SOME},
    "frozen": {"world": 2, "ep": 2, "frozen": True, "ways": SOME},
    "recompute": {
        "world": 2,
        "ep": 2,
        "ways": [(1, "none"), (2, "none"), (4, "none")],
        "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    },
    "precision": {
        "world": 2,
        "ep": 2,
        "run": precision,
        "dtype": torch.bfloat16,
        "sequence": 128,
        "config": {"moe_router_dtype": "fp32"},
        "ways": [(1, "none"), (2, "none"), (8, "none"), (8, "s4")],
    },
    "memory": {
        "world": 2,
        "ep": 2,
        "run": memory,
        "ways": [way for way in WAYS if way != (1, "none")],
    },
    "ddp-fp32": {"world": 4, "ep": 2, "run": train, "steps": STEPS},
    "ddp-bf16": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "dtype": torch.bfloat16,
    },
    "ddp-fusion": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "config": {"gradient_accumulation_fusion": True},
    },
    "ddp-reduce-in-bf16": {
        "world": 4,
        "ep": 2,
        "run": train,
        "steps": STEPS,
        "dtype": torch.bfloat16,
        "reduce_in_bf16": True,
    },
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
    with uneven_gather():
        mine = case.get("run", compare)(case)
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
