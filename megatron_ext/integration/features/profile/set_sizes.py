"""Bytes of activation sets that are not offloaded, counted in a measured step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ....runtime.wgrad import WeightGradStore
from ...measuring import place_of


class SetSizes:
    """Counts what the first microbatch's set of each chunk keeps alive, in bytes.

    Storages count once and whole, those of parameters and buffers not at all. Slices of the
    microbatch add up, without what they share.

    Args:
        models: of this rank, by chunk.

    Attributes:
        until_b: by chunk, what autograd keeps from F on; not there if it cannot be known.
        until_w: by chunk, what the store keeps from B on; not there if it cannot be known.
    """

    def __init__(self, models: Sequence[torch.nn.Module], store: WeightGradStore) -> None:
        self._own = {
            tensor.untyped_storage().data_ptr()
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
        }
        self._store = store
        self.until_b: dict[int, int] = {}
        self.until_w: dict[int, int] = {}

    def forward(self, chunk: int, microbatch: int, output: torch.Tensor) -> None:
        """After F; ``output`` still has its history."""
        if place_of(microbatch)[0] != 0:
            return
        # A graph that will not be looked into is no reason to end training.
        with contextlib.suppress(RuntimeError):
            self.until_b[chunk] = self.until_b.get(chunk, 0) + self._bytes(_saved(output))

    def postponed(self, chunk: int, microbatch: int) -> None:
        """Between B and W."""
        first = place_of(microbatch)[0] == 0
        tensors = self._store.tensors((chunk, microbatch)) if first else None
        if tensors is not None:
            self.until_w[chunk] = self.until_w.get(chunk, 0) + self._bytes(tensors)

    def stays(self, tensor: torch.Tensor) -> None:
        """A tensor outlives the sets that keep parts of it."""
        self._own.add(tensor.untyped_storage().data_ptr())

    def _bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        sizes: dict[int, int] = {}
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # has parts (quantised), no storage
                sizes[id(tensor)] = tensor.nbytes
        return sum(size for pointer, size in sizes.items() if pointer not in self._own)


def _saved(output: torch.Tensor) -> list[torch.Tensor]:
    """What the graph behind ``output`` keeps for backward, with that of Megatron's plan of the
    layers (``--overlap-moe-expert-parallel-comm``), whose parts have graphs of their own.

    Not by hooks on what autograd saves: with them a weight comes back as another tensor, and its
    gradient would go there.
    """
    found = _kept(getattr(output, "schedule_plan", None))
    todo, seen = [x.grad_fn for x in (output, *found)], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                value = getattr(node, name)
                values = value if isinstance(value, list | tuple) else [value]
                found += [x for x in values if isinstance(x, torch.Tensor)]
    return found


def _kept(plan: Any) -> list[torch.Tensor]:
    """Inputs and outputs of a plan's parts, to which their graphs are attached."""
    if plan is None:
        return []
    layers = [plan.get_layer(i) for i in range(plan.num_layers())]
    parts = [part for one in (plan, *layers) for part in vars(one).values()]
    tensors: list[Any] = []
    for part in parts:
        for name in ("inputs", "output", "detached", "before_detached"):
            value = getattr(part, name, None)
            tensors += value if isinstance(value, list | tuple) else [value]
    return [x for x in tensors if isinstance(x, torch.Tensor)]
