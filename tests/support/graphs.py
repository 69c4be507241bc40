"""A stand-in for Megatron's CUDA graphs of layers: what their record demands of a schedule.

The first step is recorded; graphs are then made in that order and share memory, so every later step
has to replay them in the same order. Each layer has one graph a microbatch and takes them in turn.
"""

from __future__ import annotations

from typing import Any

import torch


class GraphRecord:
    """Stands for ``_CudagraphGlobalRecord`` and the runners of one model's layers."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self.made = 0  # how often ``create_cudagraphs`` was called
        self.recorded: list[tuple[str, int, int]] = []
        self.replayed: list[tuple[str, int, int]] = []
        self.created = False
        self._taken = [0] * len(layers)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, n=number: self._forward(n))
            layer.register_forward_hook(lambda _, __, out, n=number: self._after(n, out))
        self._waiting: list[list[int]] = [[] for _ in layers]

    def create_cudagraphs(self) -> None:
        """As Megatron's: captures after the first step, then only checks."""
        self.made += 1
        if self.created and self.replayed != self.recorded:
            at = next(
                (
                    i
                    for i, pair in enumerate(zip(self.recorded, self.replayed))
                    if len(set(pair)) > 1
                ),
                min(len(self.recorded), len(self.replayed)),
            )
            raise AssertionError(f"replay {at} is not what was recorded there")
        if any(self._waiting):
            raise AssertionError("a graph's backward pass has not run")
        self.created = self.created or bool(self.recorded)
        self.replayed = []
        self._taken = [0] * len(self._taken)

    def _forward(self, layer: int) -> None:
        if torch.is_grad_enabled():
            graph = self._taken[layer]
            self._taken[layer] += 1
            self._waiting[layer].append(graph)
            self._note(("forward", layer, graph))

    def _after(self, layer: int, output: Any) -> None:
        # Not a module's backward hook, which would make the output a view.
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._backward(layer))

    def _backward(self, layer: int) -> None:
        self._note(("backward", layer, self._waiting[layer].pop(0)))

    def _note(self, event: tuple[str, int, int]) -> None:
        (self.replayed if self.created else self.recorded).append(event)

    def as_capture_order(self, layers_a_chunk: int) -> list[int]:
        """What was recorded, in Transformer Engine's words: each chunk's first layer stands for
        it."""
        order = []
        for kind, layer, _ in self.recorded:
            chunk, place = divmod(layer, layers_a_chunk)
            if place == (0 if kind == "forward" else layers_a_chunk - 1):
                order.append(chunk + 1 if kind == "forward" else -chunk - 1)
        return order


def install(module: Any, record: GraphRecord) -> None:
    """Let ``module``, Megatron's ``cuda_graphs``, create graphs of this record."""
    module.create_cudagraphs = record.create_cudagraphs
