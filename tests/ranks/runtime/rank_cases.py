"""What ranks can be asked to do. A public function here is a case; it takes a ``Context`` first."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import io
import os
import random
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ext.runtime.watchdog as watchdog_module
from megatron_ext.runtime.channel import Channel
from megatron_ext.runtime.edges import connected
from megatron_ext.runtime.executor import TRACE_ENVIRONMENT, Executor
from megatron_ext.runtime.trace import Recorder, TraceFile
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Schedule, check, forward_only, generate, lower
from tests.ranks.runtime import toy
from tests.ranks.runtime.accidents import ACCIDENTS, SleepyRunner, say
from tests.ranks.runtime.channel_cases import (  # noqa: F401
    buffered,
    crossed,
    drained,
    held_back,
    late_shapes,
    many_receives,
    pending,
    wrong_messages,
)
from tests.ranks.runtime.context import CPU, Context, channel, raised
from tests.support.held_time import HeldTime, TimeInPasses
from tests.support.waiting import PATIENCE


def plan(name: str, pp: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A lowered and checked schedule."""
    lowered = lower(generate(name, pp, microbatches, chunks))
    check(lowered)
    return lowered


def quiet() -> Watchdog:
    """A watchdog that is never armed."""
    return Watchdog("nobody", 1)


# --- Executor -----------------------------------------------------------------------------------


def train(
    context: Context,
    name: str,
    chunks: int | None,
    microbatches: list[int],
    dtype: str = "float32",
    jitter: bool = False,
    **messages: Any,
) -> list[dict[str, Any]]:
    """Iterations of training and evaluation, one after another in the same objects."""
    store, ledger = WeightGradStore(), toy.Ledger()
    kind = getattr(torch, dtype)
    placement = generate(name, context.size, 1, chunks).placement
    stages = {s: toy.Stage(s, kind, store, ledger) for s in placement.stages[context.rank]}
    wait = random.Random(context.rank) if jitter else None
    results = []
    for m in microbatches:
        outputs = evaluate(context, placement, m, stages, store, ledger, **messages)
        lowered = plan(name, context.size, m, chunks)
        ledger.sets.clear()
        ledger.peak = 0
        runner = toy.ToyRunner(stages, placement, context.rank, store, ledger, jitter=wait)
        recorder = Recorder(True, CPU)
        pipe = channel(context, kind, **messages)
        with no_garbage_collection():
            Executor(lowered, context.rank, runner, pipe, quiet(), recorder).run()
            ledger.mistakes += [f"{k} alive at the end" for k in ledger.sets if ledger.alive(k)]
        results.append(
            {
                "outputs": outputs,
                "losses": runner.losses,
                "grads": toy.step(stages),
                "peak": recorder.peak_sets,
                "peak_alive": ledger.peak,
                "mistakes": ledger.mistakes,
                "left": (len(runner.live), len(store), pipe.sending_to()),
                "events": recorder.events(),
            }
        )
    return results


def evaluate(
    context: Context,
    placement: Any,
    m: int,
    stages: Any,
    store: Any,
    ledger: toy.Ledger,
    **messages: Any,
) -> dict[int, bytes]:
    """Losses of a forward-only plan."""
    lowered = lower(forward_only(placement, m))
    runner = toy.ToyRunner(stages, placement, context.rank, store, ledger, forward_only=True)
    recorder = Recorder(False, CPU)
    pipe = channel(context, next(iter(stages.values())).gain.dtype, **messages)
    Executor(lowered, context.rank, runner, pipe, quiet(), recorder).run()
    if recorder.peak_sets or recorder.events() or recorder.zero_unix_us is not None:
        ledger.mistakes.append("evaluation kept activation sets or was timed")
    return runner.losses


@contextlib.contextmanager
def no_garbage_collection() -> Any:
    """Memory has to go when its last user goes, not when the collector comes by."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def reference(
    context: Context, num_stages: int, microbatches: list[int], dtype: str = "float32"
) -> list[dict[str, Any]]:
    """The same training in one process: whole model, one microbatch after another."""
    store, ledger = WeightGradStore(), toy.Ledger()
    kind = getattr(torch, dtype)
    stages = {s: toy.Stage(s, kind, store, ledger) for s in range(num_stages)}
    results = []
    for m in microbatches:
        losses = {}
        for j in range(m):
            y = toy.data(j, kind)
            for stage in stages.values():
                y = stage(y)
            loss = toy.loss_of(y, j)
            loss.backward()
            losses[j] = toy.to_bytes(loss)
        results.append({"losses": losses, "grads": toy.step(stages)})
    return results


def sent_memory(context: Context, name: str, microbatches: int, varying: bool = False) -> int:
    """Most messages that the channel held at once."""
    held, most = [], 0

    class Counting(Channel):
        def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
            nonlocal most
            copy, reference = toy.in_buffer(tensor)
            super().send(copy, peer, tag)
            del copy
            held.append(reference)
            most = max(most, sum(r() is not None for r in held))

    store, ledger = WeightGradStore(), toy.Ledger()
    lowered = plan(name, context.size, microbatches)
    rows = lowered.placement.stages[context.rank]
    stages = {s: toy.Stage(s, torch.float32, store, ledger) for s in rows}
    runner = toy.ToyRunner(stages, lowered.placement, context.rank, store, ledger)
    ways = lowered.placement.edges
    edges = connected(context.group, "passes", ways, CPU, shapes=varying)
    pipe = Counting(edges, None if varying else toy.SHAPE, torch.float32, CPU)
    recorder = Recorder(False, CPU)
    with no_garbage_collection():
        Executor(lowered, context.rank, runner, pipe, quiet(), recorder).run()
        if any(r() is not None for r in held):
            raise AssertionError("messages outlive the iteration")
    toy.step(stages)
    return most


def leftover(context: Context) -> str:
    """A lowered plan whose last consumer is missing on the second rank."""
    lowered = plan("1f1b", context.size, 1)
    rows = [list(row) for row in lowered.ranks]
    if context.rank == 1:
        # Receives F's input and never uses it.
        rows[1] = [a for a in rows[1] if str(a) == "RECV_F1.0"]
    else:
        rows[0] = [a for a in rows[0] if str(a) in ("F0.0", "SEND_F0.0")]
    store, ledger = WeightGradStore(), toy.Ledger()
    stages = {context.rank: toy.Stage(context.rank, torch.float32, store, ledger)}
    runner = toy.ToyRunner(stages, lowered.placement, context.rank, store, ledger)
    broken = lowered.with_ranks(rows)
    pipe, recorder = channel(context), Recorder(False, CPU)
    return raised(lambda: Executor(broken, context.rank, runner, pipe, quiet(), recorder).run())


def produces_nothing(context: Context) -> str:
    """A first stage whose F returns None; the other ranks do not take part."""
    runner = SleepyRunner(0, context.rank)
    runner.forward = lambda *_: None  # type: ignore[method-assign]
    lowered = plan("1f1b", 2, 1)
    pipe, recorder = channel(context), Recorder(False, CPU)
    return raised(lambda: Executor(lowered, 0, runner, pipe, quiet(), recorder).run())


def verbose(context: Context) -> list[str]:
    """What MEGATRON_EXT_TRACE=1 writes to stderr."""
    os.environ[TRACE_ENVIRONMENT] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            runner, pipe = SleepyRunner(0, context.rank), channel(context)
            lowered, recorder = plan("1f1b", context.size, 1), Recorder(False, CPU)
            Executor(lowered, context.rank, runner, pipe, quiet(), recorder).run()
    finally:
        del os.environ[TRACE_ENVIRONMENT]
    return [line for line in text.getvalue().splitlines() if not line.startswith("<")]


def profiled(context: Context) -> list[str]:
    """Names of the ranges that torch's profiler sees in an iteration, in order of time."""
    runner, pipe = SleepyRunner(0, context.rank), channel(context)
    lowered, recorder = plan("zb-h1", context.size, 1), Recorder(False, CPU)
    with torch.autograd.profiler.profile() as profile:
        Executor(lowered, context.rank, runner, pipe, quiet(), recorder).run()
    found = [event for event in profile.function_events if event.name.startswith("PP:")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


# --- Trace --------------------------------------------------------------------------------------


def trace(context: Context, name: str, microbatches: int, directory: str) -> dict[str, Any]:
    """One traced iteration, written as the integration writes it."""
    lowered = plan(name, context.size, microbatches)
    runner = SleepyRunner(0.01, context.rank)
    before = time.time()
    if context.rank == 0:
        # Zeros differ between ranks: the first rank's comes after all others'.
        dist.barrier(context.group)
        time.sleep(0.2)
    recorder = Recorder(True, CPU)
    if context.rank != 0:
        dist.barrier(context.group)
    Executor(lowered, context.rank, runner, channel(context), quiet(), recorder).run()
    file = TraceFile(directory, f"rank{context.rank}")
    for iteration in (1, 2):
        file.write(
            {
                "iteration": iteration,
                "zero_unix_us": recorder.zero_unix_us,
                "waited_us": recorder.waited_us,
                "events": recorder.events(),
            }
        )
    recorder.reset()
    empty = (recorder.events(), recorder.waited_us, recorder.peak_sets)
    return {"before": before, "after": time.time(), "empty": empty}


# --- Ranks that end early -----------------------------------------------------------------------


class Telling(Watchdog):
    """Says what the rank waits for when it does."""

    def waiting(self, detail: str, sending: Any = None) -> None:
        """See ``Watchdog``."""
        super().waiting(detail, sending)
        say(f"{self._place and self._place[0]} {detail}")


class WatchedTime(HeldTime):
    """Says how long the pause before the exit is meant to be."""

    def sleep(self, seconds: float) -> None:
        """See ``HeldTime``."""
        if seconds:
            say(f"pause of {seconds:g} s")
        super().sleep(seconds)


def iteration(
    context: Context,
    pass_seconds: float,
    microbatches: int,
    name: str = "v-half",
    special: dict[str, Any] | None = None,
    iterations: int = 1,
    idle_seconds: float = 0.0,
    in_passes: bool = False,
    limit_seconds: float = 0.4,
    poll_seconds: float = 0.02,
) -> None:
    """Watched iterations.

    ``special`` is ``{"rank", "pass", "do"}``, one rank's accident in the last iteration. Between
    iterations nobody watches. For the watchdog of rank R time counts from when the file ``clock R``
    is there, and it leaves when ``leave`` is; or time passes ``in_passes`` only.
    """
    watchdog_module.POLL_SECONDS = poll_seconds
    files = (context.folder / f"clock {context.rank}", context.folder / "leave")
    clock = TimeInPasses() if in_passes else WatchedTime(*files)
    clock.install()
    lowered = plan(name, context.size, microbatches)
    world = dist.get_rank()
    watchdog = Telling(f"pipeline rank {context.rank} (global rank {world})", limit_seconds)
    sys.stdout.write("buffered on stdout\n")  # Must come out, however the process ends.
    for number in range(1, iterations + 1):
        say(f"iteration {number}")
        runner = SleepyRunner(pass_seconds, context.rank, clock.nap)
        if special and special["rank"] == context.rank and number == iterations:
            accident = functools.partial(ACCIDENTS[special["do"]], clock)
            runner.special[special["pass"]] = accident
        recorder, pipe = Recorder(False, CPU), channel(context)
        with watchdog.armed():
            Executor(lowered, context.rank, runner, pipe, watchdog, recorder).run()
        say("iteration done")
        if number < iterations or iterations == 1:
            clock.nap(idle_seconds)
    say("all done")


# --- The processes ------------------------------------------------------------------------------


def run_once(job: dict[str, Any]) -> None:
    """A fresh rank with one case; what it raises ends the process.

    With ``tidy_exit`` as in any program. Otherwise without taking the interpreter down object by
    object, which for torch takes a forked process seconds.
    """
    _connect(job)
    group = dist.group.WORLD
    assert group is not None
    context = Context(group, job["rank"], job["world"], Path(job["folder"]))
    tidy = job["kwargs"].pop("tidy_exit", False)
    status = 0
    try:
        globals()[job["case"]](context, **job["kwargs"])
        if tidy:
            dist.destroy_process_group()
    except Exception:
        if tidy:
            raise
        traceback.print_exc()
        status = 1
    if not tidy:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve_cases(job: dict[str, Any]) -> None:
    """A rank of the pool: run cases until pytest hangs up."""
    connection = Client(job["kwargs"]["addresses"][job["rank"]], family="AF_UNIX")
    _connect(job)
    world = job["world"]
    groups = {size: dist.new_group(list(range(world - size, world))) for size in (1, 2, 3)}
    groups[world] = dist.group.WORLD
    memo: dict[str, Any] = {}
    while True:
        try:
            name, size, kwargs = connection.recv()
        except EOFError:
            return
        context = Context(
            groups[size], job["rank"] - (world - size), size, Path(job["folder"]), memo
        )
        try:
            answer = (True, globals()[name](context, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _connect(job: dict[str, Any]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['folder']}/store",
        rank=job["rank"],
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=PATIENCE),
    )


NAMES = [name for name, value in globals().items() if callable(value)]
