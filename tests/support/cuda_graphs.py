"""CUDA graphs of Megatron's ``local`` kind without a GPU: captured and replayed in name only.

Megatron's own managers, runners and record of the first step are at work. A captured graph is an
entry of a list; replaying one runs the layer, and fails where the order differs from that in which
the graphs were captured, which on a GPU would read memory that another graph has overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs


class Tape:
    """The graphs of this process.

    Attributes:
        captured: (runner, "fwd" or "bwd"), in the order of capture.
        position: of the next replay.
        calls: of ``create_cudagraphs``.
        replays: done, over all steps.
    """

    def __init__(self) -> None:
        self.captured: list[tuple[Any, str]] = []
        self.position = self.calls = self.replays = 0

    def capture(self, runner: Any, kind: str) -> None:
        """Megatron captures a graph."""
        if (runner, kind) in self.captured:
            raise RuntimeError(f"the {kind} graph of a runner is captured twice")
        self.captured.append((runner, kind))

    def replay(self, runner: Any, kind: str) -> None:
        """Megatron replays a graph in training.

        Raises:
            RuntimeError: another one comes first in the order of capture.
        """
        if self.captured[self.position] != (runner, kind):
            at = self.captured.index((runner, kind))
            raise RuntimeError(f"graph {at} ({kind}) is replayed in the place of {self.position}")
        self.position = (self.position + 1) % len(self.captured)
        self.replays += 1


class _Replayed(torch.autograd.Function):
    """Replays the backward graph where Megatron's own node does."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, runner: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.tape, ctx.runner = tape, runner
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.tape.replay(ctx.runner, "bwd")
        ctx.runner.status = cuda_graphs._GraphStatus.FWD_READY
        return None, None, gradient


def install() -> Tape:
    """Put it in force in this process."""
    tape, runner, record = Tape(), cuda_graphs._CudaGraphRunner, cuda_graphs._CudagraphGlobalRecord
    create, manager = record.create_cudagraphs, cuda_graphs.CudaGraphManager
    init = manager.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # A manager requires random states that can be captured, which CPU generators are not.
        tracker = get_cuda_rng_tracker()
        tracker.use_cudagraphable_rng = True
        init(self, *args, **kwargs)
        tracker.use_cudagraphable_rng = False

    def create_cudagraphs() -> Any:
        tape.calls += 1
        return create()

    def replay_graph_capture(self: Any, is_first: bool, args: Any, kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        if training:
            tape.replay(self, "fwd")
        out = self.func(*args, **kwargs)
        first, *rest = out if isinstance(out, tuple) else (out,)
        return (_Replayed.apply(tape, self, first) if training else first, *rest)

    manager.__init__ = __init__
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    record.create_cudagraphs = staticmethod(create_cudagraphs)
    runner.create_fwd_graph = lambda self, *args, **kwargs: tape.capture(self, "fwd")
    runner.create_bwd_graph = lambda self: tape.capture(self, "bwd")
    runner.replay_graph_capture = replay_graph_capture
    return tape
