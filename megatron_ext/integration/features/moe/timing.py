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
        experts: the layer's, timed on their own in the forward pass.
    """

    def __init__(self, hidden: torch.Tensor, experts: torch.nn.Module) -> None:
        self._cuda, self.tokens = hidden.is_cuda, hidden.numel() // hidden.shape[-1]
        self._module, self._hooks = experts, list[Any]()
        self._points, self._experts = list[Any](), list[Any]()

    def _record(self, points: list[Any]) -> None:
        point: Any = time.perf_counter()
        if self._cuda:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        points.append(point)

    def _record_time(self, _: Any = None) -> None:
        self._record(self._points)

    def _record_experts(self, *_: Any) -> None:
        self._record(self._experts)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input, to be used in its place."""
        self._record_time()
        # A pair of points for each chunk. What backward computes again is not forward's.
        self._hooks.append(self._module.register_forward_pre_hook(self._record_experts))
        self._hooks.append(self._module.register_forward_hook(self._record_experts))
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(self._record_time)
        return hidden

    def end(self, output: torch.Tensor) -> None:
        """The layer's output."""
        self._record_time()
        for hook in self._hooks:
            hook.remove()
        if output.requires_grad:
            output.register_hook(self._record_time)

    def ms_per_token(self) -> tuple[float, float] | None:
        """Of forward and backward, and of the experts' forward pass alone.

        None where backward has not run to the input. Waits for the device.
        """
        if len(self._points) != 4 or not self.tokens:
            return None
        if self._cuda:
            self._points[-1].synchronize()
        return self._ms(self._points) / self.tokens, self._ms(self._experts) / self.tokens

    def _ms(self, points: list[Any]) -> float:
        pairs = zip(points[::2], points[1::2])
        milliseconds: float
        if self._cuda:
            milliseconds = sum(start.elapsed_time(end) for start, end in pairs)
        else:
            milliseconds = 1e3 * sum(end - start for start, end in pairs)
        return milliseconds
