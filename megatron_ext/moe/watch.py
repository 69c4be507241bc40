"""How long work on a device takes, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceWatch:
    """Adds up the time between its 1st and 2nd point, its 3rd and 4th, and so on.

    Args:
        device: whose compute is watched; on a GPU the stream that is current at each point.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._points: list[Any] = []

    def point(self) -> None:
        """Here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def microseconds(self) -> int | None:
        """See ``settings.Watch``."""
        pairs = list(zip(self._points[::2], self._points[1::2]))
        if not self._cuda:
            seconds: float = sum(end - start for start, end in pairs)
            return round(1e6 * seconds)
        if not all(event.query() for event in self._points):
            return None
        milliseconds: float = sum(start.elapsed_time(end) for start, end in pairs)
        return round(1e3 * milliseconds)
