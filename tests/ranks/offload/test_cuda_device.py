"""What ``CudaDevice`` asks of torch, with torch's streams and events replaced: there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.offload.device import CudaDevice, Direction


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Streams 0 (current), 1, 2, ...; what was asked of them and of events, in order."""
    made: list[tuple[Any, ...]] = []
    count = iter(range(100))

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.number = next(count)

        def wait_event(self, event: Any) -> None:
            made.append(("wait", self.number, event))

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timed, self.done, self.ms = enable_timing, False, 0.0

        def record(self, stream: Stream) -> None:
            made.append(("record", stream.number, self.timed))

        def query(self) -> bool:
            return self.done

        def elapsed_time(self, end: Event) -> float:
            assert self.timed and end.timed and self.done and end.done
            return end.ms - self.ms

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        made.append(("on", stream.number))
        yield

    current = Stream()
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda device=None: current,
        "current_device": lambda: 3,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: ("raw", index), raising=False
    )
    return made


def test_streams_and_copies(calls):
    device = CudaDevice(torch.device("cuda"))
    assert device.stream() == ("raw", 3)
    assert CudaDevice(torch.device("cuda", 1)).stream() == ("raw", 1)
    ready: Any = device.record()
    source, target = torch.ones(3), torch.zeros(3)
    device.copy(1, Direction.TO_HOST, [(target, source)], [ready])
    assert torch.equal(target, source)
    device.wait(ready)
    buffer: Any = SimpleNamespace(record_stream=lambda s: calls.append(("used", s.number)))
    device.record_use(buffer)
    assert calls == [
        ("record", 0, False),
        ("wait", 2, ready),
        ("on", 2),
        ("record", 2, True),
        ("wait", 0, ready),
        ("used", 0),
    ]


def test_time_waited_is_from_the_wait_to_the_end_of_the_copy(calls):
    device = CudaDevice(torch.device("cuda", 0))
    reached: Any = device.record(timed=True)
    copied: Any = device.copy(0, Direction.TO_HOST, [], [])
    for event, ms in ((reached, 5.0), (copied, 7.0)):
        assert device.waited(reached, copied) is None
        event.done, event.ms = True, ms
    assert device.waited(reached, copied) == 0.002
    copied.ms = 4.0
    assert device.waited(reached, copied) == -0.001
