"""The activation store of one rank, with a host arena of the size that the plan needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ....offload.arena import HostArena, arena_bytes
from ....offload.device import Device
from ....offload.engine import Engine
from ....offload.errors import OffloadConfigError
from ....offload.host_memory import GIB
from ....offload.sets import Footprint
from ....offload.store import MIN_BYTES, ActivationStore
from ....schedule.actions import Op
from ....schedule.effects import passes
from ....schedule.schedule import Schedule
from ...errors import ConfigError
from ...utils import unwrapped
from .measure import TransferSetup, least_set_bytes, require_memory_on_hosts
from .policy import Policy, PolicyFilter, keep_nothing

logger = logging.getLogger(__name__)

MIN_BYTES_ENVIRONMENT = "MEGATRON_EXT_OFFLOAD_MIN_BYTES"
# When sets have outgrown the arena, the next ones may be larger still.
_SLACK = 8

Key = tuple[int, int]  # (model chunk, microbatch)


class RankSets:
    """Saves, moves and measures the activation sets of one rank.

    Args:
        setup: of the transfers.
        device: of this rank.
        models: this rank's chunks.
        policy: which tensors stay on the device.
        host_sets: most sets on the host at once.
        least_bytes: a set has at least so many.

    Attributes:
        store: of the sets.
        footprints: by model chunk, the largest of the sets seen so far.

    Raises:
        ConfigError: the hosts lack the memory.
    """

    def __init__(
        self,
        setup: TransferSetup,
        device: Device,
        models: Sequence[torch.nn.Module],
        policy: Policy,
        host_sets: int,
        least_bytes: int,
    ) -> None:
        require_memory_on_hosts(host_sets * least_bytes)
        self._models = [unwrapped(model) for model in models]
        # Following the modules costs time; most runs need not.
        self._filter = None if policy is keep_nothing else PolicyFilter(policy, self._models)
        with as_config_error():
            arena = HostArena(device.torch_device, expected_sets=max(1, host_sets))
            engine = Engine(device, arena, setup.policy, turns=setup.turns)
        self.store = ActivationStore(
            engine,
            self._residents,
            min_bytes=int(os.environ.get(MIN_BYTES_ENVIRONMENT, MIN_BYTES)),
            keep=self._filter,
        )
        self.footprints: dict[int, Footprint] = {}
        self._refused = 0

    @contextmanager
    def saving(self, key: Key) -> Iterator[None]:
        """Around F of ``key``."""
        with self.store.saving(key):
            yield
        known = self.footprints.get(key[0], Footprint())
        self.footprints[key[0]] = known.union(self.store.footprint(key))

    def move(self, op: Op, key: Key) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD."""
        if op is Op.OFFLOAD:
            with as_config_error():
                self.store.offload(key, self.footprints[key[0]].host)
        else:
            getattr(self.store, op.value.lower())(key)

    def fit(self, plan: Schedule, rank: int) -> None:
        """Give the arena the size that ``plan`` needs; all ranks of the job together.

        Raises:
            ConfigError: the hosts lack the memory.
        """
        engine, needed = self.store.engine, self._needed_bytes(plan, rank)
        engine.synchronize()
        require_memory_on_hosts(needed, engine.arena.capacity_bytes)
        if needed != engine.arena.capacity_bytes:
            with as_config_error():
                engine.arena.resize(needed)

    def enlarge(self, plan: Schedule, rank: int) -> None:
        """After a step in which sets outgrew the arena (varying lengths, routing): a larger one."""
        engine, refused = self.store.engine, self._refused
        self._refused = engine.counters.refused
        needed = self._needed_bytes(plan, rank)
        needed += needed // _SLACK
        if self._refused == refused or needed <= engine.arena.capacity_bytes:
            return
        engine.synchronize()
        before = engine.arena.capacity_bytes
        try:
            engine.arena.resize(needed)
            what = f"its host memory grows from {before / GIB:.3g} to {needed / GIB:.3g} GiB"
        except OffloadConfigError as error:
            engine.arena.resize(before)
            what = f"they go on doing so, because {error}"
        logger.warning(
            "megatron_ext: rank %d: activation sets have outgrown the host arena and stayed on "
            "the device; %s",
            dist.get_rank(),
            what,
        )

    def device_bytes(self, plan: Schedule, rank: int) -> int:
        """The most that the sets take on the device, by the plan and each chunk's footprint."""
        now = most = 0
        offloaded = {a[1:] for a in passes(plan.ranks[rank]) if a.op is Op.OFFLOAD}
        for op, stage, microbatch in passes(plan.ranks[rank]):
            f = self.footprints.get(plan.placement.chunk_of(stage), Footprint())
            if op is Op.F:
                now += f.here
            elif op is Op.RELEASE:
                now -= f.here - f.away
            elif op is Op.PREPARE:
                now += f.back - f.away
            elif op is Op.W or op is Op.BW:
                now -= f.back if (stage, microbatch) in offloaded else f.here
            most = max(most, now)
        return most

    def close(self) -> None:
        """End copy threads, unpin memory, remove the hooks of the models' modules."""
        if self._filter is not None:
            self._filter.close()
        self.store.engine.close()

    def _residents(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()

    def _needed_bytes(self, plan: Schedule, rank: int) -> int:
        moves = []
        for op, stage, microbatch in passes(plan.ranks[rank]):
            if op is Op.OFFLOAD or op is Op.RELOAD:
                footprint = self.footprints.get(plan.placement.chunk_of(stage), Footprint())
                moves.append(((stage, microbatch), footprint.host))
        return arena_bytes(moves)


def least_bytes(models: Sequence[Any], config: Any, shape: tuple[int, ...] | None) -> int:
    """Bytes of the smallest set that one of ``models`` can have (see ``least_set_bytes``)."""
    return min(least_set_bytes(unwrapped(model), config, shape) for model in models)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turns what the offload package refuses into an error for the user."""
    try:
        yield
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None
