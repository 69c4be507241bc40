"""Times of a layer's calls, Megatron's own layer's as well as ours."""

from __future__ import annotations

import time
from typing import Any

import torch


class CallTimer:
    """Device time of one layer call, forward and backward, read when both are over.

    On a GPU these are events on the streams of the passes, and nothing waits for them.

    Args:
        hidden: the layer's input.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._cuda, self.tokens = hidden.is_cuda, hidden.numel() // hidden.shape[-1]
        self._points = list[Any]()

    def _record(self, _: Any = None) -> None:
        point: Any = time.perf_counter()
        if self._cuda:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        self._points.append(point)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input, to be used in its place."""
        self._record()
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(self._record)
        return hidden

    def end(self, output: torch.Tensor) -> None:
        """The layer's output."""
        self._record()
        if output.requires_grad:
            output.register_hook(self._record)

    def ms_per_token(self) -> float | None:
        """Of forward and backward; None where backward has not run to the input. Waits for the
        device."""
        if len(self._points) != 4 or not self.tokens:
            return None
        if self._cuda:
            self._points[-1].synchronize()
        pairs = list(zip(self._points[::2], self._points[1::2]))
        milliseconds: float
        if self._cuda:
            milliseconds = sum(start.elapsed_time(end) for start, end in pairs)
        else:
            milliseconds = 1e3 * sum(end - start for start, end in pairs)
        return milliseconds / self.tokens
