"""Late messages and copies: what a run computes must not depend on when they arrive.

``install`` lets a rank's point-to-point messages start late, after random pauses, and fills
buffers that are to receive with NaN; copies of offloaded tensors start late, too, and released
memory is filled. Code that reads a buffer before it has waited, or writes to one that is still
being sent, then computes something else; gloo alone nearly always delivers before anybody looks.
"""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.offload import device
from tests.support.faulty_device import Faults, FaultyDevice

LONGEST = 0.004  # seconds that a message or copy waits before it starts


class _Late:
    """A message that has not started, as one of torch's work objects."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start, self._begun, self._work = start, threading.Event(), None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start it; on the thread of the rank's messages, one after another."""
        try:
            self._work = self._start()
        except BaseException as error:
            self._error = error
        self._begun.set()

    def wait(self, *args: Any) -> Any:
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return None if self._work is None else self._work.wait(*args)

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        self._begun.wait()
        return getattr(self._work, name)


def install(seed: int) -> None:
    """Delay this process's messages and copies from now on, by pauses from ``seed``."""
    pauses, messages = random.Random(seed), queue.SimpleQueue[tuple[float, _Late]]()
    faults = Faults(lambda direction: pauses.random() * LONGEST, poison=True)
    device.CpuDevice = functools.partial(FaultyDevice, faults)  # type: ignore[misc, assignment]

    def serve() -> None:
        while True:
            pause, message = messages.get()
            time.sleep(pause)
            message.begin()

    threading.Thread(target=serve, daemon=True).start()

    def delay(kind: type, name: str) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def late(self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            if name == "recv":
                for tensor in tensors:
                    if tensor.is_floating_point():
                        tensor.detach().fill_(float("nan"))
            message = _Late(lambda: original(self, tensors, *args, **kwargs))
            messages.put((pauses.random() * LONGEST, message))
            return message

        setattr(kind, name, late)

    for name in ("send", "recv"):
        # Megatron's messages go through the one, those of our channels through the other.
        for kind in (torch.distributed.ProcessGroup, torch.distributed.ProcessGroupGloo):
            delay(kind, name)
