"""What the parts share: Megatron's own GPT layers, our executor on a rank, stand-ins for peers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    import megatron_ext.cpu

    megatron_ext.cpu.install()
    torch.set_num_threads(1)

import torch.distributed as dist  # noqa: E402
from megatron.core import package_info, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ext.integration import split_local as wgrad  # noqa: E402
from megatron_ext.integration.callbacks import Step  # noqa: E402
from megatron_ext.integration.feature import Run  # noqa: E402
from megatron_ext.integration.features.offload import Offload  # noqa: E402
from megatron_ext.integration.hooks import Hooks  # noqa: E402
from megatron_ext.integration.runner import Call, Iteration, MegatronRunner  # noqa: E402
from megatron_ext.runtime.channel import Channel, Receipt  # noqa: E402
from megatron_ext.runtime.edges import connected  # noqa: E402
from megatron_ext.runtime.executor import Executor  # noqa: E402
from megatron_ext.runtime.trace import Recorder  # noqa: E402
from megatron_ext.runtime.watchdog import Watchdog  # noqa: E402
from megatron_ext.runtime.wgrad import WeightGradStore  # noqa: E402
from megatron_ext.schedule import Placement, check, lower  # noqa: E402
from megatron_ext.schedule.actions import Action, Op  # noqa: E402
from megatron_ext.schedule.schedule import Schedule  # noqa: E402

# The shim answers for "cuda" where there is none.
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
HEAD = 128


@dataclass(frozen=True)
class Size:
    """One model and pipeline. ``layers`` are those of a rank, over all its chunks; ``batch`` is
    the samples of a microbatch."""

    hidden: int
    seq: int
    layers: int
    pp: int
    microbatches: int
    batch: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a message: (sequence, samples, hidden)."""
        return (self.seq, self.batch, self.hidden)

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, seq {self.seq}, {self.layers} layers a rank, p = {self.pp}, "
            f"m = {self.microbatches}"
        )


class Sdpa(torch.nn.Module):
    """Causal attention by torch, which takes a flash kernel where it has one; Megatron's own
    without Transformer Engine would keep a (sequence x sequence) matrix a head."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """(sequence, batch, heads, width) each -> (sequence, batch, heads * width)."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class Chunk(torch.nn.Module):
    """Some of Megatron's transformer layers, as Megatron's runner asks for a model chunk."""

    def __init__(self, config: Any, first_layer: int, layers: int) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList()
        for number in range(first_layer, first_layer + layers):
            self.layers.append(layer_of(config, number))
        self._given: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """What arrived from the stage before."""
        self._given = tensors[0]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """All layers."""
        y = x if self._given is None else self._given
        for layer in self.layers:
            y = layer(y, attention_mask=None)[0]
        return y


def layer_of(config: Any, number: int) -> torch.nn.Module:
    """Layer ``number``, from 0, with weights that depend on its number alone."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = Sdpa
    layer: torch.nn.Module = build_module(spec, config=config, layer_number=number + 1)
    layer.to(DEVICE, torch.bfloat16)
    layer.number = number
    generator = torch.Generator(DEVICE).manual_seed(1000 + number)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return layer


def config(size: Size, graphs: bool = False, **others: Any) -> TransformerConfig:
    """Megatron's configuration of such layers, with its local CUDA graphs or without, and with
    ``others`` of its fields. It knows no pipeline: layers are numbered here."""
    fields: dict[str, Any] = {
        "num_layers": size.layers * size.pp,
        "hidden_size": size.hidden,
        "num_attention_heads": max(1, size.hidden // HEAD),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights are made on the device, by _layer.
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        # A layer's output is in the graphs' memory (see features/cuda_graphs.py).
        "deallocate_pipeline_outputs": not graphs,
        "cuda_graph_impl": "local" if graphs else "none",
        "cuda_graph_modules": [],
    }
    return TransformerConfig(**(fields | others))


class AtHome:
    """A channel whose peers always have an answer: what is sent vanishes, what is received is
    there at once, in memory of its own."""

    posts_late = False
    device = torch.device("cpu")  # no message that the device would wait for

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._template = torch.randn(shape, device=DEVICE).to(torch.bfloat16)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Nowhere."""

    def receive(self, peer: int, tag: int) -> torch.Tensor:
        """A copy of always the same."""
        return self._template.clone()

    def settle(self, peer: int, count: int) -> None:
        """All are."""

    def sending_to(self) -> list[int]:
        """Nobody."""
        return []

    def finish(self) -> None:
        """Nothing is under way."""


def ways(pp: int) -> frozenset[tuple[int, int]]:
    """(source, target) of messages of any placement on so many ranks, a V's too."""
    return Placement.loop(pp, 2).edges


class Staged:
    """Messages between processes that share one GPU: through the host, by gloo."""

    posts_late = False
    device = torch.device("cpu")

    def __init__(self, group: Any, shape: tuple[int, ...]) -> None:
        cpu = torch.device("cpu")
        edges = connected(group, "passes", ways(group.size()), cpu)
        self._inner = Channel(edges, shape, torch.bfloat16, cpu)
        self.settle, self.sending_to = self._inner.settle, self._inner.sending_to
        self.finish = self._inner.finish

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Waits for the device, then as ``Channel``."""
        # A copy on CPU tensors, too: there the receiver of a local message may write in place.
        self._inner.send(tensor.detach().to("cpu", copy=True), peer, tag)

    def receive(self, peer: int, tag: int) -> Receipt:
        """As ``Channel``; waiting brings the message to the device."""
        return _StagedReceipt(self._inner.receive(peer, tag))


class _StagedReceipt(Receipt):
    def __init__(self, inner: Receipt) -> None:
        self._inner, self.peer = inner, inner.peer

    def wait(self) -> torch.Tensor:
        """The message on the device."""
        return self._inner.wait().to(DEVICE)


class _OneRank(Step):
    """A step of a rank whose number the process group does not know: peers may be emulated."""

    emulated = 0

    @property
    def rank(self) -> int:
        return self.emulated


class Rank:
    """One rank of a pipeline: its layers and our executor, step after step.

    Args:
        size: of the model.
        plan: with offload actions or without; not lowered.
        rank: which one's list is run.
        channel: its messages; None: peers are emulated.
        group: the process group, for offloading and the runner.
        graphs: layers are captured in the first step, as Megatron's own CUDA graphs.
    """

    def __init__(
        self, size: Size, plan: Schedule, rank: int, group: Any, channel: Any, graphs: bool = False
    ) -> None:
        self.size, self.rank = size, rank
        self.plan = lower(plan)
        self.report = check(self.plan)
        self._group = group
        self._config, self._graphs = config(size, graphs), graphs
        per_chunk = size.layers // plan.chunks
        stages = plan.placement.stages[rank]
        self.chunks = [Chunk(self._config, stage * per_chunk, per_chunk) for stage in stages]
        for module in self._captured():
            # Several microbatches are in flight, whatever Megatron's pipeline group says.
            module.reuse_cudagraphs = False
        for parameter in self._parameters() if graphs else ():
            # A captured backward pass adds to it, as to data parallelism's buffer.
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self._channel = channel or AtHome(size.shape)
        self.store = WeightGradStore()
        self.offloading = None
        hooks = list(wgrad.hooks(self.store))
        if plan.has_offload:
            request = SimpleNamespace(offloads=True, offload=None, file=plan)
            args = SimpleNamespace(pp_trace=None, pp_offload_policy=None)
            self.offloading = Offload()
            self.offloading.start(Run(args, package_info.__version__, request=request))
            # Behind those of W, so around them.
            hooks += self.offloading.hooks()
        self._hooks = Hooks(package_info.__version__)
        self._hooks.apply(hooks)
        self._watchdog = Watchdog(f"rank {rank}", 200.0)
        self._done = False
        self.recorder = Recorder(True, DEVICE)
        self.losses: list[float] = []

    def step(self, timed: bool = True) -> dict[str, float]:
        """One iteration: seconds that the host issued for, and until the device was done."""
        self.recorder = Recorder(timed, DEVICE)
        iteration = Iteration(
            forward_step,
            [inputs(self.size) for _ in self.chunks],
            list(self.chunks),
            self._config,
            self.size.microbatches,
            1,
            False,
            False,
            None,
        )
        groups = (self._group,)
        step = _OneRank(Call(iteration, self._group, self.size.shape, (0, 0), groups))
        step.plan, step.emulated = self.plan, self.rank
        if self.offloading is not None:
            self.offloading.before_plan(step)
            self.offloading.begin(step)
        runner = MegatronRunner(iteration, self.plan.placement, self.rank, self.store, step.mover)
        synchronize()
        started, cpu = time.perf_counter(), time.process_time()
        with self._watchdog.armed():
            executor = Executor(
                self.plan, self.rank, runner, self._channel, self._watchdog, self.recorder
            )
            executor.run()
        if self._graphs:
            cuda_graphs.create_cudagraphs()  # after the first step; then does nothing
        issued, cpu = time.perf_counter() - started, time.process_time() - cpu
        synchronize()
        took = time.perf_counter() - started
        runner.check_finished()
        if self.offloading is not None:
            self.offloading.end(step)
        self.losses = [float(entry["loss"]) for entry in runner.losses]
        return {"issued": issued, "cpu": cpu, "took": took}

    def _captured(self) -> list[Any]:
        """The managers of graphs of all layers."""
        modules = (module for chunk in self.chunks for module in chunk.modules())
        return [one for one in modules if isinstance(one, cuda_graphs.CudaGraphManager)]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def passes(self) -> dict[tuple[int, Op], float]:
        """Median seconds of a pass in the last step, by (chunk, operation)."""
        found: dict[tuple[int, Op], list[float]] = {}
        for action, seconds in self.recorder.durations():
            key = self.plan.placement.chunk_of(action.stage), action.op
            found.setdefault(key, []).append(seconds)
        return {key: statistics.median(times) for key, times in found.items()}

    def actions(self) -> tuple[Action, ...]:
        """Of this rank."""
        return self.plan.ranks[self.rank]

    def close(self) -> None:
        """Give Megatron its functions back, and the host and the device their memory."""
        if self._done:
            return
        self._done = True
        self._hooks.revert()
        if self._graphs:
            cuda_graphs.delete_cuda_graphs()
            torch.cuda.set_stream(torch.cuda.default_stream())  # as before the first manager
        if self.offloading is not None:
            self.offloading.close()
        self.chunks, self._channel = [], None
        release()


def forward_step(iterator: Any, chunk: Chunk) -> Any:
    """As a training script would define it; the loss is cheap."""
    x = next(iterator) if chunk._given is None else None
    return chunk(x), _loss


def _loss(y: torch.Tensor) -> Any:
    loss = y.float().square().mean()
    return loss, {"loss": loss.detach().clone()}


def inputs(size: Size) -> Iterator[torch.Tensor]:
    """What enters the first stage, made on the device."""
    for number in range(size.microbatches):
        generator = torch.Generator(DEVICE).manual_seed(number)
        x = torch.randn(size.shape, generator=generator, device=DEVICE, dtype=torch.float32)
        yield x.to(torch.bfloat16).requires_grad_(True)


def synchronize() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def release() -> None:
    """Give back what nothing uses any more."""
    import gc

    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def start(rank: int = 0, world: int = 1, store: str | None = None, backend: str = "gloo") -> Any:
    """The process group: of this process alone, or of several that share ``store``, a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    if CUDA:
        torch.cuda.set_device(DEVICE)
    parallel_state.initialize_model_parallel(1, world, create_gloo_process_groups=False)
    return parallel_state.get_pipeline_model_parallel_group()
