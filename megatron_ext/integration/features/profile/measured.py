"""Measured passes and sets, and the profile that all ranks of a call make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ....plan.profile import MODEL, Profile, settings
from ....plan.quantization import recipe_of
from ....plan.times import PassTimes
from ....runtime.trace import Recorder
from ....runtime.wgrad import WeightGradStore
from ....schedule.actions import Action, Op
from ....schedule.placement import Placement
from ...callbacks import Duration
from ...measuring import Seconds, place_of
from ...utils import gather_over


def durations(recorders: Iterable[tuple[Recorder, Placement]]) -> list[Duration]:
    """All passes of these iterations; waits for the device. Joint actions, whose passes have no
    times of their own, do not count."""
    return [
        (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
        for recorder, placement in recorders
        for action, seconds in recorder.durations()
        if isinstance(action, Action) and isinstance(action.op, Op)
    ]


def agree(
    placement: Placement,
    rank: int,
    seconds: Seconds,
    hop: float,
    models: Sequence[Any],
    shape: tuple[int, int],
    groups: Sequence[Any],
    *,
    set_bytes: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
    rates: tuple[float, float] | None = None,
    cheap_recompute: bool = False,
) -> Profile:
    """The measurements of all stages; all ranks of a call do this together.

    Args:
        hop: seconds of a message between neighbours.
        models: this rank's chunks, without wrappers.
        shape: sequence length and microbatch size.
        groups: of the call.
        set_bytes: of this rank's sets, by chunk, until B and until W, as far as they are known.
        rates: to this rank's host and back, in bytes/s.
        cheap_recompute: the run has ``--pp-cheap-recompute``.

    Returns:
        The same on all ranks: of ranks that hold the same stage, the slowest and largest.
    """
    until_b, until_w = set_bytes
    mine = {
        stage: (
            [seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W)],
            len(getattr(getattr(models[chunk], "decoder", None), "layers", ())),
            until_b.get(chunk),
            until_w.get(chunk),
        )
        for chunk, stage in enumerate(placement.stages[rank])
    }
    every = gather_over((mine, hop, rates), groups)
    stages = range(placement.num_stages)
    found = [[part[stage] for part, _, _ in every if stage in part] for stage in stages]
    config, (length, size) = models[0].config, shape
    about = {name: getattr(config, name, None) for name in MODEL}
    about["seq_length"] = length
    known = [r for _, _, r in every if r is not None]
    return Profile(
        micro_batch_size=size,
        layers=tuple(rows[0][1] for rows in found),
        stages=tuple(
            PassTimes(*(max(1e-9, *column) for column in zip(*(row[0] for row in rows))))
            for rows in found
        ),
        cheap_recompute=cheap_recompute,
        set_bytes=_largest(found, 2),
        weight_set_bytes=_largest(found, 3),
        hop=max(h for _, h, _ in every),
        to_host=min(r[0] for r in known) if known else None,
        to_device=min(r[1] for r in known) if known else None,
        model={name: value for name, value in about.items() if value is not None},
        settings=settings(
            config, recipe_of(lambda name: getattr(config, name, None)), cheap_recompute
        ),
    )


def _largest(found: Sequence[Sequence[Sequence[Any]]], column: int) -> tuple[int, ...] | None:
    """Of every stage the largest number that its ranks have; None if a stage has none."""
    sizes = [[row[column] for row in rows if row[column] is not None] for rows in found]
    return tuple(map(max, sizes)) if all(sizes) else None


class SetSizes:
    """Counts what the first microbatch's set of each chunk keeps (a ``SetObserver``), in bytes.

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
        if place_of(microbatch)[0] != 0:
            return
        # A graph that will not be looked into is no reason to end training.
        with contextlib.suppress(RuntimeError):
            self.until_b[chunk] = self.until_b.get(chunk, 0) + self._bytes(_saved(output))

    def postponed(self, chunk: int, microbatch: int) -> None:
        first = place_of(microbatch)[0] == 0
        tensors = self._store.tensors((chunk, microbatch)) if first else None
        if tensors is not None:
            self.until_w[chunk] = self.until_w.get(chunk, 0) + self._bytes(tensors)

    def stays(self, tensor: torch.Tensor) -> None:
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
