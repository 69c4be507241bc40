"""What passes, messages and sets really take, measured in training and agreed on by all ranks."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...plan.profile import MODEL, Profile
from ...plan.times import PassTimes
from ...runtime.channel import Channel
from ...runtime.trace import Recorder
from ...runtime.wgrad import WeightGradStore
from ...schedule.actions import Action, Op
from ...schedule.placement import Placement
from ..arguments import MegatronArgs
from ..utils import gather

logger = logging.getLogger(__name__)

# Seconds of F, B and W, by chunk of this rank and operation.
Seconds = Mapping[tuple[int, Op], float]
# One pass: (chunk, operation, microbatch, seconds).
Duration = tuple[int, Op, int, float]
# Of this rank, by chunk: bytes of a set from F to B, and from B to W.
Sizes = tuple[Mapping[int, int], Mapping[int, int]]


def profiler_of(args: MegatronArgs) -> Profiler:
    """What Megatron's arguments ask to be measured."""
    steps = args.pp_profile_steps or 0
    return Profiler(steps, args.pp_profile if steps else None, bool(args.pp_cheap_recompute))


class Profiler:
    """Collects what the first training steps take.

    The device is waited for once, when they are over.

    Args:
        steps: how many of them the user wants measured; 0: none.
        path: of the file for the profile, or None.
        cheap_recompute: the run has ``--pp-cheap-recompute``.

    Attributes:
        reorders: the order is to be made anew for what was measured.
    """

    def __init__(
        self, steps: int = 0, path: str | None = None, cheap_recompute: bool = False
    ) -> None:
        self.reorders = steps > 0
        self.path, self._cheap = path, cheap_recompute
        self._left = steps
        self._recorders: list[tuple[Recorder, Placement]] = []
        self._sizes: SetSizes | None = None

    def require(self, steps: int) -> None:
        """Measure at least so many steps."""
        self._left = max(self._left, steps)

    @property
    def active(self) -> bool:
        """True if the step that comes is to be timed."""
        return self._left > 0

    def sizes(self, models: Sequence[torch.nn.Module], store: WeightGradStore) -> SetSizes | None:
        """What counts the bytes of the step that comes; None if it is not to be counted."""
        if not self.reorders or self._sizes is not None:
            return None
        self._sizes = SetSizes(models, store)
        return self._sizes

    def add(self, recorder: Recorder, placement: Placement) -> bool:
        """Take a step's passes; True if it was the last one."""
        self._recorders.append((recorder, placement))
        self._left -= 1
        return self._left == 0

    def take(self) -> list[Duration]:
        """All passes, once; waits for the device. Joint actions, whose passes have no times of
        their own, do not count."""
        recorders, self._recorders = self._recorders, []
        return [
            (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
            for recorder, placement in recorders
            for action, seconds in recorder.durations()
            if isinstance(action, Action) and isinstance(action.op, Op)
        ]

    def agree(
        self,
        placement: Placement,
        rank: int,
        seconds: Seconds,
        hop: float,
        models: Sequence[Any],
        shape: tuple[int, int],
        set_bytes: Mapping[int, int] | None = None,
        rates: tuple[float, float] | None = None,
    ) -> Profile:
        """The measurements of all stages; all ranks of the job call this together.

        Args:
            placement: of the stages.
            rank: this one's, in the pipeline.
            seconds: of this rank's passes.
            hop: seconds of a message between neighbours.
            models: this rank's chunks, without wrappers.
            shape: sequence length and microbatch size.
            set_bytes: of this rank's sets, by chunk, if the offload engine counted them.
            rates: to this rank's host and back, in bytes/s.

        Returns:
            The same on all ranks: of ranks that hold the same stage, the slowest and largest.
        """
        counted = ({}, {}) if self._sizes is None else (self._sizes.until_b, self._sizes.until_w)
        until_b, until_w = set_bytes or counted[0], counted[1]
        mine = {
            stage: (
                [seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W)],
                len(getattr(getattr(models[chunk], "decoder", None), "layers", ())),
                until_b.get(chunk),
                until_w.get(chunk),
            )
            for chunk, stage in enumerate(placement.stages[rank])
        }
        every = gather((mine, hop, rates))
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
            cheap_recompute=self._cheap,
            set_bytes=_largest(found, 2),
            weight_set_bytes=_largest(found, 3),
            hop=max(h for _, h, _ in every),
            to_host=min(r[0] for r in known) if known else None,
            to_device=min(r[1] for r in known) if known else None,
            model={name: value for name, value in about.items() if value is not None},
        )

    def save(self, profile: Profile) -> None:
        """Write the file, on the first rank of the job, if one was asked for."""
        if self.path is None or dist.get_rank() != 0:
            return
        try:
            profile.save(self.path)
        except OSError as error:
            # Hours of training are worth more than the file.
            logger.warning(
                "megatron_ext: --pp-profile %s cannot be written: %s", self.path, error.strerror
            )
            return
        logger.warning("megatron_ext: what was measured is in %s", self.path)


def _largest(found: Sequence[Sequence[Sequence[Any]]], column: int) -> tuple[int, ...] | None:
    """Of every stage the largest number that its ranks have; None if a stage has none."""
    sizes = [[row[column] for row in rows if row[column] is not None] for rows in found]
    return tuple(map(max, sizes)) if all(sizes) else None


class SetSizes:
    """Counts what the first microbatch's set of each chunk keeps alive, in bytes.

    Storages count once and whole, those of parameters and buffers not at all.

    Args:
        models: of this rank, by chunk.
        store: of postponed weight gradients.

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
        if microbatch != 0:
            return
        # A graph that will not be looked into is no reason to end training.
        with contextlib.suppress(RuntimeError):
            self.until_b[chunk] = self._bytes(_saved(output))

    def postponed(self, chunk: int, microbatch: int) -> None:
        """Between B and W."""
        tensors = self._store.tensors((chunk, microbatch)) if microbatch == 0 else None
        if tensors is not None:
            self.until_w[chunk] = self._bytes(tensors)

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
    """What the graph behind ``output`` keeps for backward.

    Not by hooks on what autograd saves: with them a weight comes back as another tensor, and its
    gradient would go there.
    """
    found: list[torch.Tensor] = []
    todo, seen = [output.grad_fn], set()
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


def pass_seconds(
    durations: Sequence[Duration], of: Callable[[Sequence[float]], float] = statistics.median
) -> dict[tuple[int, Op], float]:
    """What F, B and W of each chunk take.

    The first microbatch of a step does not count if there are others: its passes also load kernels.
    A BW counts half to each.

    Args:
        durations: (chunk, operation, microbatch, seconds).
        of: the number that stands for a pass's times.
    """
    every: dict[tuple[int, Op], list[float]] = {}
    last = max((microbatch for _, _, microbatch, _ in durations), default=0)
    for chunk, op, microbatch, seconds in durations:
        if microbatch == 0 and last > 0:
            continue
        for part in (Op.B, Op.W) if op is Op.BW else (op,):
            every.setdefault((chunk, part), []).append(seconds / (2 if op is Op.BW else 1))
    return {key: of(times) for key, times in every.items()}


def hop_seconds(channel: Channel, group: Any) -> float:
    """One way of a message to the next rank, half of the best of five round trips.

    All ranks of ``group`` call this together. 0 where shapes vary.
    """
    if channel.shape is None:
        return 0.0
    device = channel.device
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    message = torch.zeros(channel.shape, dtype=channel.dtype, device=device)
    best = float("inf")
    for turn in (0, 1):  # pairs (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...
        first = rank % 2 == turn
        peer = rank + 1 if first else rank - 1
        dist.barrier(group)
        for _ in range(6 if 0 <= peer < size else 0):
            started = time.perf_counter()
            if first:
                dist.send(message, ranks[peer], group)
                dist.recv(message, ranks[peer], group)
            else:
                dist.recv(message, ranks[peer], group)
                dist.send(message, ranks[peer], group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if first:
                best = min(best, (time.perf_counter() - started) / 2)
    dist.barrier(group)
    return best if best < float("inf") else 0.0
