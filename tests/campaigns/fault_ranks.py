"""The ranks that ``tests/campaigns/faults.py`` forks: small pipelines, one with a fault.

The executor, channel, watchdog, activation store and transfer engine are the ones that training
uses; only the model is small. Accidents happen inside the action they are for: in the middle of
the pass, between the message's order and its transfer, in the copy.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.device import CpuDevice
from megatron_ext.offload.engine import Engine
from megatron_ext.offload.store import ActivationStore
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Schedule, check, generate, lower
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.link import Link
from megatron_ext.schedule.passes.offload import offload
from tests.support.held_time import HeldTime
from tests.support.waiting import PATIENCE, wait_until

CPU = torch.device("cpu")
SHAPE = (16, 32)
MICROBATCHES = 6
ITERATIONS = 3
FAULTY = 1  # the iteration with the accident
NAP_SECONDS = 0.002
LIMIT_SECONDS = 2.0  # of the watchdog, from the accident on
# A process that has this much left to take cannot make another tensor of a pass.
SPARE_BYTES, WANTED_BYTES = 1 << 20, 256 << 20


@dataclass(frozen=True)
class Case:
    """One accident.

    Attributes:
        kind: of ``ACCIDENTS``, or ``none``.
        schedule: ``1f1b``, ``v-half``, …; all but ``1f1b`` with offload.
        pp: ranks.
        rank: whose accident it is.
        action: in which it happens, as text; ``between`` for: after the iteration.
        seconds: how long a delay is.
        tidy: an exception takes the interpreter down as in any script, not by ``os._exit``.
        slices: of a microbatch.
    """

    kind: str
    schedule: str
    pp: int
    rank: int
    action: str
    seconds: float = 0.0
    tidy: bool = False
    slices: int = 1


def harmless(case: Case) -> bool:
    """True if the pipeline should go on as if nothing had happened."""
    return case.kind == "none" or (case.kind == "delayed" and case.seconds < LIMIT_SECONDS)


@functools.cache
def plan(name: str, pp: int, slices: int = 1) -> Schedule:
    """The lowered schedule of a case."""
    schedule = generate(name, pp, MICROBATCHES, slices=slices)
    if name != "1f1b":
        schedule = offload(schedule, Link.of(pp, "0.25"), "full").schedule
    lowered = lower(schedule)
    check(lowered)
    return lowered


class Layer(torch.autograd.Function):
    """``tanh(x @ weight.T)`` whose weight gradient waits for W after a B pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: WeightGradStore) -> Any:
        """Keep the input and the output."""
        y = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, y)
        ctx.weight, ctx.store = weight, store
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """B, and W too unless it is postponed."""
        (x, y), weight = ctx.saved_tensors, ctx.weight
        grad = grad * (1 - y * y)
        gradient = None
        if ctx.store.collecting:
            ctx.store.put(weight, functools.partial(_accumulate, weight, x, grad))
        else:
            gradient = grad.t() @ x
        return grad @ weight.detach(), gradient, None


def _accumulate(weight: torch.nn.Parameter, x: torch.Tensor, grad: torch.Tensor) -> None:
    product = grad.t() @ x
    weight.grad = product if weight.grad is None else weight.grad + product


class Accident:
    """Happens once, inside the action that the case names."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case, self._mine, self._folder = (
            case,
            case.kind != "none" and case.rank == rank,
            folder,
        )
        self.iteration = 0
        self.current = ""

    def due(self) -> bool:
        """True in the action of the accident; notes when that was."""
        case = self.case
        if not self._mine or self.iteration != FAULTY or self.current != case.action:
            return False
        self._mine = False
        (self._folder / "when").write_text(repr(time.time()))
        return True

    def has_given_up(self) -> bool:
        """True if a rank has reported that it waits no longer."""
        logs = self._folder.glob("rank*.log")
        return any("made no progress" in log.read_text() for log in logs)

    def happen(self) -> None:
        """Have the accident, if it is due and one of a whole process."""
        if self.due():
            PROCESS_ACCIDENTS[self.case.kind]()


def _out_of_memory() -> None:
    """A limit of the kernel's, which stays: the report must come out without memory, too."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
    torch.empty(WANTED_BYTES, dtype=torch.uint8)


def _raise() -> None:
    raise ValueError("the model is on fire")


PROCESS_ACCIDENTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "hang": lambda: time.sleep(3600),
    "memory": _out_of_memory,
}


class Watching(Watchdog):
    """Tells the accident which action runs."""

    def __init__(self, name: str, accident: Accident) -> None:
        super().__init__(name, LIMIT_SECONDS)
        self._accident = accident

    def at(self, action: Action, *args: Any) -> None:
        """See ``Watchdog``."""
        self._accident.current = str(action)
        super().at(action, *args)


class _Later:
    """A message that the network keeps for a while; the sender's buffer is free at once."""

    def __init__(self, wait: Callable[[], None], send: Any) -> None:
        self._thread = threading.Thread(target=self._run, args=(wait, send), daemon=True)
        self._thread.start()

    def _run(self, wait: Callable[[], None], send: Any) -> None:
        wait()
        with contextlib.suppress(RuntimeError):  # the peer may be gone by then
            send().wait()

    def wait(self) -> None:
        """As gloo's: the message has left this process's hands."""


class Wire(Channel):
    """A channel whose messages may be lost or come late."""

    accident: Accident

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """See ``Channel``."""
        kind, seconds = self.accident.case.kind, self.accident.case.seconds
        if kind not in ("lost", "delayed"):
            self.accident.happen()
        elif self.accident.due():
            backend, there = self._edges.to(peer)
            later = functools.partial(backend.send, [tensor.contiguous()], there, tag)
            work = _Later(functools.partial(self._delay, kind, seconds), later)
            self._sending.setdefault(peer, deque()).append((work, tensor))
            return
        super().send(tensor, peer, tag)

    def _delay(self, kind: str, seconds: float) -> None:
        """Too late is what comes when a rank has given up."""
        if kind == "lost":
            time.sleep(3600)
        elif seconds < LIMIT_SECONDS:
            time.sleep(seconds)
        else:
            wait_until(self.accident.has_given_up, "no rank gave up")

    def receive(self, peer: int, tag: int) -> Any:
        """See ``Channel``."""
        self.accident.happen()
        return super().receive(peer, tag)


class Device(CpuDevice):
    """Copies may fail or hang."""

    accident: Accident

    def copy(self, stream: int, direction: Any, pairs: Any, after: Any) -> Any:
        """See ``CpuDevice``."""
        kind = self.accident.case.kind
        if kind in ("bad copy", "stuck copy") and self.accident.due():
            after = [*after, _Accident(kind == "stuck copy")]
        return super().copy(stream, direction, pairs, after)


class _Accident:
    """What a copy waits for in the copier's thread."""

    def __init__(self, stuck: bool) -> None:
        self._stuck = stuck

    def synchronize(self) -> None:
        if self._stuck:
            time.sleep(3600)
        raise RuntimeError("the link is broken")


class Runner:
    """StageRunner with offload, for one iteration."""

    def __init__(
        self, plan: Schedule, rank: int, weights: dict[int, Any], store: ActivationStore,
        wgrad: WeightGradStore, accident: Accident,
    ) -> None:  # fmt: skip
        self.placement, self.rank, self.weights = plan.placement, rank, weights
        self.store, self.wgrad, self.accident = store, wgrad, accident
        self.live: dict[tuple[int, int], Any] = {}
        self.losses: dict[int, str] = {}
        chunk_of = plan.placement.chunk_of
        self.leaving = {
            (chunk_of(a.stage), a.microbatch) for a in plan.ranks[rank] if a.op is Op.OFFLOAD
        }

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """F."""
        time.sleep(NAP_SECONDS)
        number, key = self.placement.stages[self.rank][chunk], (chunk, microbatch)
        if x is None:
            generator = torch.Generator().manual_seed(microbatch)
            x = torch.randn(SHAPE, generator=generator)
        x.requires_grad_(True)
        saving = self.store.saving(key) if key in self.leaving else contextlib.nullcontext()
        with saving:
            y = x
            for weight in self.weights[number]:
                y = Layer.apply(y, weight, self.wgrad)
            self.accident.happen()
        last = number == self.placement.num_stages - 1
        if last:
            y = y.square().mean()
            self.losses[microbatch] = float(y.detach()).hex()
        result = None if last else y.detach()
        self.live[key] = x, y
        if key in self.leaving:
            release_storage(x)
        return result

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        """B or BW."""
        time.sleep(NAP_SECONDS)
        key = (chunk, microbatch)
        x, y = self.live[key]
        with self.wgrad.collect(key) if split else contextlib.nullcontext():
            torch.autograd.backward(y, grad)
            self.accident.happen()
        if split:
            self.live[key] = None
        else:
            self._finished(key)
        result: torch.Tensor = x.grad
        return result

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        time.sleep(NAP_SECONDS)
        self.accident.happen()
        self.wgrad.run((chunk, microbatch))
        self._finished((chunk, microbatch))

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD."""
        if self.accident.case.kind not in ("bad copy", "stuck copy"):
            self.accident.happen()
        getattr(self.store, op.value.lower())((chunk, microbatch))

    def live_sets(self) -> int:
        """Activation sets on the device."""
        return len(self.live) - len(self.store.away())

    def _finished(self, key: tuple[int, int]) -> None:
        del self.live[key]
        if key in self.leaving:
            self.store.finish(key)


def train(case: Case, rank: int, folder: Path) -> None:
    """The rank's whole life: iterations, each ended by all ranks together."""
    group = dist.group.WORLD
    assert group is not None
    lowered, accident = plan(case.schedule, case.pp, case.slices), Accident(case, rank, folder)
    weights = {
        stage: [
            torch.nn.Parameter(torch.randn(SHAPE[1], SHAPE[1], generator=_seed(stage, i)) / 5)
            for i in range(2)
        ]
        for stage in lowered.placement.stages[rank]
    }
    device = Device()
    device.accident = accident
    arena = HostArena(CPU, expected_sets=2 * MICROBATCHES * case.slices)
    every = [weight for stage in weights.values() for weight in stage]
    store = ActivationStore(Engine(device, arena), lambda: every, min_bytes=0)
    wgrad = WeightGradStore()
    watchdog = Watching(f"pipeline rank {rank} (global rank {rank})", accident)
    result = []
    for accident.iteration in range(ITERATIONS):
        runner = Runner(lowered, rank, weights, store, wgrad, accident)
        edges = connected(group, "passes", lowered.placement.edges, CPU)
        wire = Wire(edges, SHAPE, torch.float32, CPU)
        wire.accident = accident
        try:
            with watchdog.armed():
                recorder = Recorder(False, CPU)
                Executor(lowered, rank, runner, wire, watchdog, recorder).run()
        except BaseException:
            _require_nothing_left(wgrad, store, arena)
            raise
        store.end_step()
        result.append([sorted(runner.losses.items()), step(weights)])
        accident.current = "between"
        accident.happen()
    (folder / f"result{rank}.json").write_text(json.dumps(result))


def _seed(stage: int, layer: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * stage + layer)


def step(weights: dict[int, Any]) -> str:
    """Plain SGD; a hash of all weights."""
    digest = hashlib.sha256()
    for stage in sorted(weights):
        for weight in weights[stage]:
            weight.data -= 0.1 * weight.grad
            weight.grad = None
            digest.update(weight.detach().numpy().tobytes())
    return digest.hexdigest()


def _require_nothing_left(wgrad: WeightGradStore, store: ActivationStore, arena: HostArena) -> None:
    """What the integration does with an exception; then no host memory may be in use."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    wgrad.clear()
    store.clear()
    left = arena.used_bytes, len(store), len(wgrad)
    store.engine.close()
    copiers = [t.name for t in threading.enumerate() if t.name.startswith("copy")]
    print(f"<left {(*left, arena.capacity_bytes, len(copiers))}>", flush=True)


def run(case: Case, rank: int, folder: Path) -> None:
    """Connect, train, and end the process."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A rank that comes late has not hung. Where nobody has to give up, time never starts.
    HeldTime(folder / ("never" if harmless(case) else "when")).install()
    status = 0
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=case.pp,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    try:
        train(case, rank, folder)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        if case.tidy:
            raise
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
