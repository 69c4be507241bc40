"""What the parts share: Megatron's GPT layers with its gradient buffers, our executor on one rank
of a pipeline, a stand-in for its peers, and rounds of measurements."""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    import megatron_ext.cpu

    megatron_ext.cpu.install()
    torch.set_num_threads(1)

import torch.distributed as dist
from megatron.core import package_info, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.integration import split_local
from megatron_ext.integration.callbacks import Step
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.offload import Offload
from megatron_ext.integration.gradients import gradient_hook
from megatron_ext.integration.hooks import Hooks
from megatron_ext.integration.runner import Call, Iteration, MegatronRunner
from megatron_ext.runtime.channel import Receipt
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Op, Schedule, check, lower

DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
HEAD, BF16, WARM_SECONDS, ROUNDS = 128, torch.bfloat16, 10.0, 5


@dataclass(frozen=True)
class Size:
    """One model and pipeline.

    Attributes:
        layers: on a rank, over all its chunks.
        tp: the layers are one tensor-parallel rank's part, without the all-reduces.
    """

    hidden: int
    seq: int
    layers: int = 1
    pp: int = 1
    microbatches: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a message: (sequence, samples, hidden)."""
        return (self.seq, 1, self.hidden)

    def __str__(self) -> str:
        return f"h {self.hidden}, s {self.seq}" + (f", TP {self.tp}" if self.tp > 1 else "")


def config(size: Size, **others: Any) -> TransformerConfig:
    """Megatron's configuration of such layers, with ``others`` of its fields."""
    heads = max(1, size.hidden // HEAD)
    fields: dict[str, Any] = {
        "num_layers": size.layers * size.pp, "hidden_size": size.hidden,
        "num_attention_heads": max(1, heads // size.tp), "kv_channels": size.hidden // heads,
        "ffn_hidden_size": 4 * size.hidden // size.tp, "add_bias_linear": False, "bf16": True,
        "params_dtype": BF16, "pipeline_dtype": BF16, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "perform_initialization": False,
        "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "persist_layer_norm": False,
        "deallocate_pipeline_outputs": True,
    }  # fmt: skip
    return TransformerConfig(**(fields | others))


class Sdpa(torch.nn.Module):
    """Causal attention by the kernel that torch chooses for whole sequences."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """(sequence, batch, heads, width) each -> (sequence, batch, heads * width)."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def initialized(layer: torch.nn.Module, number: int) -> torch.nn.Module:
    """``layer`` on the device in bf16, with weights that depend on its number alone."""
    layer.to(DEVICE, BF16)
    generator = torch.Generator(DEVICE).manual_seed(1000 + number)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return layer


def buffered(config: Any, module: torch.nn.Module) -> Any:
    """``module`` in Megatron's data parallelism, whose float32 buffers take the gradients."""
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    # On another stream, as in training: a graph may not depend on the default one.
    stream = torch.cuda.stream(torch.cuda.Stream()) if CUDA else contextlib.nullcontext()
    with hooked([gradient_hook()]), stream:
        wrapped = DistributedDataParallel(config, options, module)
    synchronize()
    return wrapped


def layers_of(size: Size, numbers: Iterable[int]) -> list[Any]:
    """Megatron's layers of these numbers, from 0, each with buffers of its own."""
    made, spec = config(size), get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Sdpa
    layers = ((n, build_module(spec, config=made, layer_number=n + 1)) for n in numbers)
    return [buffered(made, initialized(layer, number)) for number, layer in layers]


@contextlib.contextmanager
def hooked(hooks: Sequence[Any]) -> Iterator[None]:
    """Inside, our functions are in place of Megatron's."""
    applied = Hooks(package_info.__version__)
    applied.apply(hooks)
    try:
        yield
    finally:
        applied.revert()


class Chunk(torch.nn.Module):
    """Some layers, as Megatron's runner asks for a model chunk; ``full``: recomputed one by one."""

    def __init__(self, config: Any, layers: Sequence[Any], full: bool = False) -> None:
        super().__init__()
        self.config, self._full = config, full
        self.layers = torch.nn.ModuleList(layers)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """What arrived from the stage before."""
        self.given = tensors[0]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """All layers."""
        y = x if self.given is None else self.given
        for layer in self.layers:

            def one(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                return layer(x, attention_mask=None)[0]

            y = tensor_parallel.checkpoint(one, False, y) if self._full else one(y)
        return y


class _Late(Receipt):
    """A message that is there from a moment on."""

    def __init__(self, tensor: torch.Tensor, peer: int, moment: float) -> None:
        self._tensor, self.peer, self._moment = tensor, peer, moment

    def wait(self) -> torch.Tensor:
        """The host waits; until then the device does what it was given before."""
        time.sleep(max(0.0, self._moment - time.perf_counter()))
        return self._tensor.clone()


class AtHome:
    """A channel without peers: what is sent vanishes, what is received is always the same.

    Attributes:
        arrivals: seconds from the step's beginning at which a message is there, by its tag; others
            are at once.
    """

    posts_late, device = False, torch.device("cpu")  # no message that the device would wait for

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._template = torch.randn(shape, device=DEVICE).to(BF16)
        self.arrivals: Mapping[int, float] = {}
        self.began = 0.0
        self.send = self.settle = self.finish = lambda *_: None
        self.sending_to = list[int]

    def receive(self, peer: int, tag: int) -> Receipt:
        """A copy of the template, from its arrival on."""
        return _Late(self._template, peer, self.began + self.arrivals.get(tag, 0.0))


class _OneRank(Step):
    """A step of a rank whose number the process group does not know."""

    rank = 0  # type: ignore[assignment]


class Rank:
    """One rank of a pipeline: its layers and our executor, step after step.

    Args:
        plan: with offload actions or without; not lowered.
        channel: its messages; None: it has no peers.
        layers: shared with other ranks of this process; None: its own, by their numbers.
        recompute: "", "selective" (core attention and MLP) or "full".
    """

    def __init__(
        self, size: Size, plan: Schedule, rank: int, group: Any, channel: Any = None,
        layers: Sequence[Any] | None = None, recompute: str = "",
    ) -> None:  # fmt: skip
        self.size, self.rank, self.recompute, self._group = size, rank, recompute, group
        self.plan = lower(plan)
        self.report = check(self.plan)
        self._config = config(size)
        count, stages = size.layers // plan.chunks, plan.placement.stages[rank]
        if layers is None:
            layers = layers_of(size, [n for s in stages for n in range(s * count, (s + 1) * count)])
        self.layers = layers
        parts = [layers[i * count : (i + 1) * count] for i in range(plan.chunks)]
        self.chunks = [Chunk(self._config, part, recompute == "full") for part in parts]
        self.channel = AtHome(size.shape) if channel is None else channel
        self.inputs = [batch(size, number) for number in range(size.microbatches)]
        self.store, self.offloading = WeightGradStore(), None
        self._hooks = list(split_local.hooks(self.store))
        if plan.has_offload:
            request = SimpleNamespace(offloads=True, offload=None, file=plan)
            args = SimpleNamespace(pp_trace=None, pp_offload_policy=None)
            self.offloading = Offload()
            self.offloading.start(Run(args, package_info.__version__, request=request))
            self._hooks += self.offloading.hooks()  # behind those of W, so around them
        self._watchdog = Watchdog(f"rank {rank}", 200.0)
        self.recorder = Recorder(False, DEVICE)
        self.losses: list[float] = []

    def gradients(self) -> list[torch.Tensor]:
        """The float32 gradients of all parameters."""
        return [p.main_grad for layer in self.layers for p in layer.parameters()]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, a step may be issued; gradients begin at zero."""
        for layer in self.layers:
            selective = self.recompute == "selective"
            layer.module.self_attention.checkpoint_core_attention = selective
            layer.module.recompute_mlp = selective
            layer.zero_grad_buffer()
        with hooked(self._hooks):
            synchronize()
            yield

    def issue(self, timed: bool) -> list[torch.Tensor]:
        """Launch one iteration; the losses of the last stage."""
        self.recorder = Recorder(timed, DEVICE)
        feeds = [iter([x.detach().requires_grad_(True) for x in self.inputs]) for _ in self.chunks]
        count, chunks = self.size.microbatches, list(self.chunks)
        iteration = Iteration(
            forward_step, feeds, chunks, self._config, count, 1, False, False, None
        )
        step = _OneRank(Call(iteration, self._group, self.size.shape, (0, 0), (self._group,)))
        step.plan, step.rank = self.plan, self.rank
        if self.offloading is not None:
            self.offloading.before_plan(step)
            self.offloading.begin(step)
        runner = MegatronRunner(iteration, self.plan.placement, self.rank, self.store, step.mover)
        self.channel.began = time.perf_counter()
        given = self.plan, self.rank, runner, self.channel, self._watchdog, self.recorder
        Executor(*given).run()
        runner.check_finished()
        if self.offloading is not None:
            self.offloading.end(step)
        return [entry["loss"] for entry in runner.losses]

    def step(self, timed: bool = True) -> dict[str, float]:
        """One iteration: seconds that the host issued for, and until the device was done."""
        with self.ready(), self._watchdog.armed():
            started = time.perf_counter()
            losses = self.issue(timed)
            issued = time.perf_counter() - started
            synchronize()
            took = time.perf_counter() - started
        self.losses = [float(loss) for loss in losses]
        return {"issued": issued, "took": took}

    def passes(self) -> dict[tuple[int, Op], float]:
        """Median seconds of a pass in the last step, by (chunk, operation)."""
        found: dict[tuple[int, Op], list[float]] = {}
        for action, seconds in self.recorder.durations():
            key = self.plan.placement.chunk_of(action.stage), action.op
            found.setdefault(key, []).append(seconds)
        return {key: statistics.median(times) for key, times in found.items()}

    def close(self) -> None:
        """Give host and device their memory back."""
        if self.offloading is not None:
            self.offloading.close()
        self.chunks, self.layers, self.channel = [], [], None
        release()


def forward_step(iterator: Any, chunk: Chunk) -> Any:
    """As a training script would define it; the loss is cheap."""

    def loss(y: torch.Tensor) -> Any:
        found = y.float().square().mean()
        return found, {"loss": found.detach().clone()}

    return chunk(next(iterator) if chunk.given is None else None), loss


def batch(size: Size, seed: int) -> torch.Tensor:
    """Random numbers of a message's shape, on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size.shape, generator=generator, device=DEVICE).to(BF16)


def synchronize() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def release() -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def start(rank: int = 0, world: int = 1, store: str = "", backend: str = "gloo") -> Any:
    """The process group: of this process alone, or of several that share ``store``, a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared = dist.FileStore(store, world) if store else dist.HashStore()
    dist.init_process_group(backend, store=shared, rank=rank, world_size=world)
    if CUDA:
        torch.cuda.set_device(DEVICE)
        threading.Thread(target=_sample, daemon=True).start()
    parallel_state.initialize_model_parallel(1, world, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return parallel_state.get_pipeline_model_parallel_group()


_SAMPLES: list[tuple[float, float, float]] = []  # (time, MHz, W), beside what runs


def _sample() -> None:
    with contextlib.suppress(Exception):  # without nvidia-ml-py there are none
        while True:
            read = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
            _SAMPLES.append((time.perf_counter(), *read))
            time.sleep(0.2)


def warm(seconds: float) -> None:
    """Full power for so long, before anything is timed."""
    if CUDA and seconds:
        x, end = torch.randn(8192, 8192, device=DEVICE).to(BF16), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(20):
                torch.mm(x, x)
            synchronize()


def alternate(
    ways: Mapping[Any, Callable[[], Any]], rounds: int
) -> dict[Any, tuple[list[Any], dict[str, float]]]:
    """All ways in every round: by way what it returned, and medians of SM clock and power."""
    found: dict[Any, Any] = {name: ([], {}) for name in ways}
    inside: dict[Any, list[Any]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            before = len(_SAMPLES)
            found[name][0].append(way())
            inside[name] += _SAMPLES[before:]
    for name, samples in inside.items():
        for i, key in ((1, "mhz"), (2, "watts")) if samples else ():
            found[name][1][key] = round(statistics.median(s[i] for s in samples))
    return found


def spread(values: Iterable[float], digits: int = 4) -> list[float]:
    """[median, least, most]."""
    found = [*values]
    return [round(x, digits) for x in (statistics.median(found), min(found), max(found))]


def tried(row: dict[str, Any], measure: Callable[..., dict[str, Any]], *args: Any) -> Any:
    """``row`` with what ``measure`` returns, or with why it could not; printed."""
    try:
        row |= measure(*args)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        error.__traceback__ = None  # its frames hold memory
    release()
    print(row, flush=True)
    return row


Keep = Callable[[dict[str, Any]], None]


def main(run: Callable[[bool, Keep], dict[str, Any]]) -> None:
    """One part as a process: ``run`` gets whether it is in miniature, and what keeps results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not (CUDA or args.tiny):
        sys.exit("there is no CUDA device; --tiny runs without, for no figure")
    gpu = torch.cuda.get_device_properties(0) if CUDA else None
    about = {
        "gpu": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" if gpu else None,
        "torch": torch.__version__, "python": sys.version.split()[0],
        "megatron": version("megatron-core"),
    }  # fmt: skip

    def keep(result: dict[str, Any]) -> None:
        """Whole at any moment, whoever ends the process."""
        new = args.into.with_suffix(".new")
        new.write_text(json.dumps({"about": about, **result}))
        new.replace(args.into)

    keep(run(args.tiny, keep))
