"""``torch.cuda`` as one quiet device: its functions, streams, events, generators, statistics."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# Reported compute capability, "MAJOR.MINOR". Below 10 (Blackwell) Megatron insists on
# CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism, as on the GPU that is named.
CAPABILITY_ENVIRONMENT = "MEGATRON_EXT_CPU_CAPABILITY"
_CAPABILITY = "10.0"

_current_device = 0


def capability() -> tuple[int, int]:
    """The compute capability that this process reports.

    Raises:
        ValueError: ``MEGATRON_EXT_CPU_CAPABILITY`` is not of the form 9.0.
    """
    text = os.environ.get(CAPABILITY_ENVIRONMENT, _CAPABILITY)
    major, point, minor = text.partition(".")
    if not (point and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise ValueError(
            f"{CAPABILITY_ENVIRONMENT}={text} is not a compute capability; give it as MAJOR.MINOR, "
            "e.g. 9.0"
        )
    return int(major), int(minor)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Return at once: nothing is ever pending on a CPU."""


class CpuStream:
    """A stream whose work is always done: CPU operations return when they have finished."""

    synchronize = wait_stream = wait_event = _nothing

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority
        self.cuda_stream = self.stream_id = self.device_index = self.device_type = 0
        # Where a stream's device is used to place tensors, that place is the CPU.
        self.device = torch.device("cpu")

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (lowest, highest) priority, as an NVIDIA GPU reports them."""
        return (0, -5)

    def query(self) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return ``event`` (or a new one), recorded now."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Return False: there are no graphs to capture."""
        return False


class CpuEvent:
    """An event that has happened when it is recorded; it measures host time."""

    synchronize = wait = _nothing
    query = CpuStream.query

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_ms: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the present time."""
        self._time_ms = time.perf_counter() * 1e3

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of the two was never recorded.
        """
        if self._time_ms is None or end_event._time_ms is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return end_event._time_ms - self._time_ms


class CpuContext(contextlib.nullcontext[None], contextlib.ContextDecorator):
    """Stands in for ``torch.cuda.device`` and the like."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


_STREAM = CpuStream()
_current = threading.local()


def _current_stream(device: Any = None) -> CpuStream:
    """The stream of this thread, as ``set_stream`` or the innermost ``stream`` context made it."""
    stream: CpuStream = getattr(_current, "stream", _STREAM)
    return stream


def _set_stream(stream: CpuStream | None) -> None:
    if stream is not None:
        _current.stream = stream


class CpuStreamContext(contextlib.ContextDecorator):
    """Stands in for ``torch.cuda.stream``: the given stream is the current one inside."""

    def __init__(self, stream: CpuStream | None) -> None:
        self.stream = stream
        self._outer: list[CpuStream] = []

    def __enter__(self) -> None:
        self._outer.append(_current_stream())
        _set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        _set_stream(self._outer.pop())


def _set_device(device: Any) -> None:
    """Remember the index: ``current_device()`` must answer with what was set."""
    global _current_device
    index = device.index if isinstance(device, torch.device) else device
    if isinstance(index, int) and index >= 0:
        _current_device = index


def _device_count() -> int:
    """One device for every rank of this machine, so that LOCAL_RANK is a valid index."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _host_memory_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _properties(device: Any = None) -> Any:
    """Return what Megatron reads of a device's properties."""
    return SimpleNamespace(
        name="CPU (megatron_ext.cpu)",
        major=capability()[0],
        minor=capability()[1],
        total_memory=_host_memory_bytes(),
        multi_processor_count=os.cpu_count() or 1,
    )


def _seed(seed: int) -> None:
    # Not torch.manual_seed, which seeds CUDA through this very function.
    torch.default_generator.manual_seed(int(seed))


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(state)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _lazy_call(callback: Callable[[], Any], **kwargs: Any) -> None:
    # torch queues the callback until CUDA starts, which never happens here. Megatron sets its
    # random states through it.
    callback()


def _answer(value: Any = None) -> Callable[..., Any]:
    """Return a new function that takes anything and returns ``value``.

    A new one each time: torch._dynamo, which torch's optimizers import even when it is disabled,
    keeps a table from torch's functions to rules and refuses one object under two names.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    return function


# Calls that order, free, mark or reset something on a GPU.
_NO_OPS = (
    *("_lazy_init", "_sleep", "check_error", "empty_cache", "init", "ipc_collect"),
    *("reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_peak_memory_stats", "set_per_process_memory_fraction", "synchronize"),
)
# Calls that count something of a GPU: nothing there is in use.
_COUNTERS = (
    *("clock_rate", "max_memory_allocated", "max_memory_cached", "max_memory_reserved"),
    *("memory_allocated", "memory_cached", "memory_reserved", "power_draw", "temperature"),
    "utilization",
)


def _replacements() -> dict[str, Any]:
    """Return name -> replacement for the functions and classes of ``torch.cuda``."""
    table: dict[str, Any] = {name: _answer() for name in _NO_OPS}
    table.update({name: _answer(0) for name in _COUNTERS})
    table.update(
        # Megatron asserts is_available and skips its process groups when device_count is zero.
        is_available=_answer(True),
        device_count=_device_count,
        current_device=lambda: _current_device,
        set_device=_set_device,
        is_bf16_supported=_answer(True),
        get_device_capability=_answer(capability()),
        get_device_name=_answer(_properties().name),
        get_device_properties=_properties,
        mem_get_info=_answer((_host_memory_bytes(), _host_memory_bytes())),
        memory_stats=lambda device=None: collections.defaultdict(int),
        memory_summary=_answer("no GPU memory: running on the CPU"),
        cudart=lambda: SimpleNamespace(cudaProfilerStart=_answer(0), cudaProfilerStop=_answer(0)),
        # Random state: CPU operations draw from torch's default generator.
        default_generators=(torch.default_generator,) * max(_device_count(), 1),
        get_rng_state=_get_rng_state,
        get_rng_state_all=lambda: [_get_rng_state()],
        set_rng_state=_set_rng_state,
        set_rng_state_all=lambda states: _set_rng_state(states[0]),
        initial_seed=lambda: torch.default_generator.initial_seed(),
        manual_seed=lambda seed: _seed(seed),
        manual_seed_all=lambda seed: _seed(seed),
        seed=lambda: torch.default_generator.seed(),
        seed_all=lambda: torch.default_generator.seed(),
        _lazy_call=_lazy_call,
        # Streams and events.
        Stream=CpuStream,
        Event=CpuEvent,
        StreamContext=type("StreamContext", (CpuStreamContext,), {}),
        device=type("device", (CpuContext,), {}),
        device_of=type("device_of", (CpuContext,), {}),
        stream=type("stream", (CpuStreamContext,), {}),
        current_stream=_current_stream,
        set_stream=_set_stream,
        default_stream=_answer(_STREAM),
        is_current_stream_capturing=_answer(False),
    )
    return table


def _patch_accelerator() -> None:
    """``torch.accelerator``: there is none.

    A CUDA build without a driver still answers that CUDA is the accelerator and then raises when
    asked for its current stream, which torch's own Adam does in every step.
    """
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    answers: dict[str, Any] = {"is_available": False, "device_count": 0, "current_stream": _STREAM}
    answers |= dict.fromkeys(("current_device_index", "current_device_idx"), 0)
    silent = ("current_accelerator", "set_device_index", "set_device_idx", "set_stream")
    answers |= dict.fromkeys((*silent, "synchronize"))
    for name, value in answers.items():
        if hasattr(accelerator, name):
            setattr(accelerator, name, _answer(value))


def install() -> None:
    """Rebind ``torch.cuda`` and its sub-modules. Call once, from ``megatron_ext.cpu``."""
    table = _replacements()
    # The sub-modules hold the same functions under the same names, and both names are used
    # (Megatron: torch.cuda.get_rng_state and torch.cuda.random.get_rng_state).
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for name, replacement in table.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, replacement)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _answer())
    torch.cuda.nvtx.range = type("range", (CpuContext,), {})
    torch.cuda.profiler.start = _answer()
    torch.cuda.profiler.stop = _answer()
    _patch_accelerator()
