"""Streams, events and copies as the transfer engine needs them: of CUDA, or of threads.

Three timelines matter: the host, which only issues work; the compute stream; the copy streams. On
CPU tensors copy streams are threads, so the same ordering mistakes give the same wrong numbers.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from ..runtime.threads import Worker
from .blocks import Form

STUCK_SECONDS = 120.0

# (destination, source): tensors of one dense form.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Direction(enum.Enum):
    """Which way a copy goes."""

    TO_HOST = "device-to-host"
    TO_DEVICE = "host-to-device"


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True if all work before it is done; never waits."""

    def synchronize(self) -> None:
        """The host waits for it (at start, at the end and after errors only).

        Raises:
            RuntimeError: the work failed, or did not end in two minutes.
        """


class Device(Protocol):
    """One device with a compute stream and numbered copy streams."""

    torch_device: torch.device
    pins_host_memory: bool

    def stream(self) -> Hashable:
        """Which compute stream is the caller's: what the methods below call compute."""

    def record(self, timed: bool = False) -> Event:
        """An event after everything that compute was given so far; ``timed`` for ``waited``."""

    def wait(self, event: Event) -> None:
        """What compute is given from now on runs after ``event``; the host does not wait."""

    def waited(self, reached: Event, copied: Event) -> float | None:
        """Seconds from ``reached``, timed, to the end of a copy; negative if the copy ended first.

        None: not both have happened. The host does not wait.
        """

    def copy(
        self,
        stream: int,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Event],
    ) -> Event:
        """Copy on one copy stream after the events ``after``.

        ``pairs`` may be emptied once it is copied. The returned event follows the last copy.
        """

    def allocate(self, nbytes: int, form: Form | None = None) -> torch.Tensor:
        """Device memory for compute, ordered with the compute stream: dense, of ``form``, or else
        1-D uint8."""
        if form is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        return torch.empty_strided(
            form.shape, form.stride, dtype=form.dtype, device=self.torch_device
        )

    def record_use(self, buffer: torch.Tensor) -> None:
        """Compute uses memory that another compute stream has allocated: it is not given out again
        before what this one was given so far is done, wherever it is dropped."""
        return None

    def discard(self, buffer: torch.Tensor) -> None:
        """The caller is about to drop ``buffer``; compute may be given its memory next, as the
        caching allocator orders it on the compute stream."""
        return None

    def synchronize(self) -> None:
        """The host waits for all copies."""

    def close(self) -> None:
        """End threads, after what they were given."""
        return None


class CudaDevice(Device):
    """A CUDA device: copy streams and events.

    Device memory is allocated and freed on the compute stream only, so the caching allocator needs
    ``record_stream`` only where backward uses a stream of its own (shared experts beside the
    dispatch), and its behaviour is the same every step (PipeOffload, appendix C).
    """

    pins_host_memory = True

    def __init__(self, torch_device: torch.device, streams: int = 2) -> None:
        self.torch_device = torch_device
        index = torch_device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._streams = [torch.cuda.Stream(torch_device) for _ in range(streams)]

    def stream(self) -> Hashable:
        # Asked for every saved tensor; a Stream object would take ten times as long.
        return torch._C._cuda_getCurrentRawStream(self._index)

    def record(self, timed: bool = False) -> Event:
        # The stream that is current for the caller counts as compute.
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.torch_device).wait_event(event)  # type: ignore[arg-type]

    def waited(self, reached: Any, copied: Any) -> float | None:
        if not (reached.query() and copied.query()):
            return None
        milliseconds: float = reached.elapsed_time(copied)
        return milliseconds / 1e3

    def copy(
        self,
        stream: int,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Event],
    ) -> Event:
        on = self._streams[stream % len(self._streams)]
        for event in after:
            on.wait_event(event)  # type: ignore[arg-type]
        with torch.cuda.stream(on):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)
        done.record(on)
        return done

    def record_use(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.torch_device))

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


class HostEvent(Future[None]):
    """An event of a thread: done, or failed with an exception; ``time`` is when it was done."""

    def __init__(self, done: bool = False) -> None:
        super().__init__()
        self.time = time.monotonic()
        if done:
            self.set_result(None)

    def query(self) -> bool:
        return self.done()

    def wait(self) -> BaseException | None:
        """Wait until the work is over; returns why it failed.

        Raises:
            RuntimeError: it did not end in two minutes.
        """
        try:
            return self.exception(STUCK_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"a transfer has not ended after {STUCK_SECONDS:.0f} s") from None

    def synchronize(self) -> None:
        if (error := self.wait()) is not None:
            raise RuntimeError(f"a transfer failed: {error}") from error


class CpuDevice(Device):
    """CPU tensors as "device" memory; every copy stream is a thread, and compute is the caller.

    Args:
        throttle_bytes_per_second: emulated link, by direction; None: as fast as memory is.
    """

    pins_host_memory = False

    def __init__(
        self,
        streams: int = 2,
        throttle_bytes_per_second: dict[Direction, float] | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.throttle_bytes_per_second = throttle_bytes_per_second or {}
        self._copiers = [Worker(f"copy stream {number}") for number in range(streams)]
        self._copies: list[HostEvent] = []

    def stream(self) -> Hashable:
        return 0

    def record(self, timed: bool = False) -> HostEvent:
        return HostEvent(done=True)  # Compute is the caller: it has done all that it was given.

    def wait(self, event: Event) -> None:
        event.synchronize()

    def waited(self, reached: Any, copied: Any) -> float | None:
        if not (reached.query() and copied.query()):
            return None
        seconds: float = copied.time - reached.time
        return seconds

    def copy(
        self,
        stream: int,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Event],
    ) -> HostEvent:
        after, event = list(after), HostEvent()

        def task() -> None:
            for other in after:
                other.synchronize()
            start = time.monotonic()
            for destination, source in pairs:
                destination.copy_(source)
            rate = self.throttle_bytes_per_second.get(direction)
            if rate is not None:
                nbytes = sum(source.nbytes for _, source in pairs)
                time.sleep(max(0.0, start + nbytes / rate - time.monotonic()))
            event.time = time.monotonic()
            # The event outlives the copy; what it copied must not.
            pairs.clear()
            after.clear()

        self._copiers[stream % len(self._copiers)].put(task, event)
        self._copies = [copy for copy in self._copies if not copy.query()]
        self._copies.append(event)
        return event

    def synchronize(self) -> None:
        copies, self._copies = self._copies, []
        for event in copies:
            event.wait()
        for event in copies:
            event.synchronize()

    def close(self) -> None:
        for worker in self._copiers:
            worker.close(STUCK_SECONDS)


def device_for(torch_device: torch.device) -> Device:
    """The device that serves tensors on ``torch_device``."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()
