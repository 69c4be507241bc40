"""A ``ScriptServer`` job's prelude: the CPU's streams get clocks, and a layer's parts take time.

A stream is busy until some moment; what is launched on it starts then or now, whichever is later,
and the host goes on at once, as with a GPU. Events carry these moments from stream to stream. A
message waits until its tensor is there, and so does the end of a step.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _busy(stream: Any) -> float:
    return max(time.perf_counter(), getattr(stream, "busy", 0.0))


def spend(seconds: float) -> None:
    """Keep the current stream busy for so long."""
    stream = torch.cuda.current_stream()
    stream.busy = _busy(stream) + seconds


def wait() -> None:
    """Let the host wait for the current stream."""
    time.sleep(max(0.0, _busy(torch.cuda.current_stream()) - time.perf_counter()))


class _Spend(torch.autograd.Function):
    """Nothing but time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: float, backward: Callable[[], float]
    ) -> torch.Tensor:
        ctx.backward_time = backward
        spend(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spend(ctx.backward_time())
        return grad, None, None


def _clocks() -> None:
    from megatron_ext.cpu import cuda_api

    stream, event = cuda_api.CpuStream, cuda_api.CpuEvent

    def record(self: Any, of: Any = None) -> None:
        self._time_ms = time.perf_counter() * 1e3
        self.at = _busy(of or torch.cuda.current_stream())

    def wait_event(self: Any, of: Any) -> None:
        self.busy = max(_busy(self), getattr(of, "at", 0.0))

    event.record = record  # type: ignore[method-assign]
    event.wait = lambda self, of=None: wait_event(of or torch.cuda.current_stream(), self)  # type: ignore[method-assign]
    stream.wait_event = wait_event  # type: ignore[method-assign]
    stream.wait_stream = lambda self, of: setattr(self, "busy", max(_busy(self), _busy(of)))  # type: ignore[method-assign]


def _after(owner: Any, name: str, forward: float, backward: Callable[[], float]) -> None:
    """The first tensor that a method returns takes its time."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            return (_Spend.apply(result[0], forward, backward), *result[1:])
        return _Spend.apply(result, forward, backward)

    setattr(owner, name, method)


def _before(owner: Any, name: str) -> None:
    """A call that waits until what the current stream makes is there."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        wait()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def prepare(value: dict[str, float], rank: int, folder: str) -> None:
    """Give a layer's parts their times: ``compute`` seconds in F, B and W each, in equal parts of
    attention and experts, and ``exchange`` in F and in B each, in equal parts of dispatch and
    combine. Writes the seconds of every step."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.training import training

    from megatron_ext.runtime.channel import Channel
    from megatron_ext.runtime.wgrad import WeightGradStore

    half, sent = value["compute"] / 2, value["exchange"] / 2
    collecting: list[WeightGradStore] = []

    def backward() -> float:
        return half if collecting and collecting[0].collecting else 2 * half

    _clocks()
    _after(Attention, "forward", half, backward)
    _after(experts.SequentialMLP, "forward", half, backward)
    for name in ("token_dispatch", "token_combine"):
        _after(MoEAlltoAllTokenDispatcher, name, sent, lambda: sent)

    made, run = WeightGradStore.__init__, WeightGradStore.run

    def init(self: WeightGradStore) -> None:
        made(self)
        collecting[:] = [self]

    def weights(self: WeightGradStore, key: Any, finish: bool = True) -> None:
        run(self, key, finish)
        spend(value["compute"] * value["layers"])

    WeightGradStore.__init__ = init  # type: ignore[method-assign]
    WeightGradStore.run = weights  # type: ignore[method-assign]
    for owner, name in ((Channel, "send"), (dist, "isend")):
        _before(owner, name)

    steps: list[float] = []
    train_step = training.train_step
    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["forward_backward_func"] = passes(bound.arguments["forward_backward_func"])
        return train_step(*bound.args, **bound.kwargs)

    def passes(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            started = time.perf_counter()
            result = original(*args, **kwargs)
            wait()
            steps.append(time.perf_counter() - started)
            Path(folder, f"steps{rank}.json").write_text(json.dumps(steps))
            return result

        return forward_backward

    training.train_step = timed
