"""Activation sets of one rank, with a host arena of the size that the plan needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ....offload.errors import OffloadConfigError
from ....offload.host_memory import GIB
from ....offload.saved import smallest
from ....offload.sets import Footprint
from ....offload.store import ActivationStore
from ....schedule.actions import Op
from ....schedule.schedule import Schedule
from ...errors import ConfigError
from ...utils import unwrapped
from . import memory
from .measure import TransferSetup
from .policy import OffloadPolicy, PolicyFilter, keep_nothing

logger = logging.getLogger(__name__)

# When sets have outgrown the arena, the next ones may be larger still.
_SLACK = 8

Key = tuple[int, int]  # (model chunk, microbatch)


class RankSets:
    """Saves, moves and measures the activation sets of one rank.

    Args:
        policy: which tensors stay on the device.
        host_sets: most sets on the host at once.
        least_bytes: a set has at least so many on the host.
        groups: of the call.

    Attributes:
        footprints: by model chunk and slice, the largest of the sets seen so far.

    Raises:
        ConfigError: the hosts lack the memory.
    """

    def __init__(
        self,
        setup: TransferSetup,
        models: Sequence[torch.nn.Module],
        policy: OffloadPolicy,
        host_sets: int,
        least_bytes: int,
        groups: Sequence[Any],
    ) -> None:
        # What the first step allocates is at least that.
        memory.require_on_hosts(host_sets * least_bytes, 0, groups)
        self._models = [unwrapped(model) for model in models]
        # Following the modules costs time; most runs need not.
        self._filter = None if policy is keep_nothing else PolicyFilter(policy, self._models)
        with as_config_error():
            engine = setup.engine(host_sets)
        self.store = ActivationStore(
            engine,
            self._residents,
            min_bytes=smallest(),
            keep=self._filter,
        )
        self.footprints: dict[memory.Part, Footprint] = {}
        self._refused = 0

    @contextmanager
    def saving(self, key: Key) -> Iterator[None]:
        """Around F of ``key``."""
        if self._filter is not None:
            self._filter.reset()
        with self.store.saving(key):
            yield
        part = memory.part_of(*key)
        known = self.footprints.get(part, Footprint())
        self.footprints[part] = known.union(self.store.footprint(key))

    def move(self, op: Op, key: Key) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD."""
        if op is Op.OFFLOAD:
            with as_config_error():
                self.store.offload(key, self.footprints[memory.part_of(*key)].host)
        else:
            getattr(self.store, op.value.lower())(key)

    def fit(self, plan: Schedule, rank: int, groups: Sequence[Any]) -> None:
        """Give the arena the size that ``plan`` needs; all ranks of a call together.

        Raises:
            ConfigError: the hosts lack the memory.
        """
        engine, needed = self.store.engine, memory.host_bytes(plan, rank, self.footprints)
        engine.synchronize()
        held = engine.arena.capacity_bytes
        memory.require_on_hosts(needed, held, groups)
        with as_config_error():
            engine.arena.resize(needed)

    def enlarge(self, plan: Schedule, rank: int) -> None:
        """Enlarge the arena after a step in which sets outgrew it (varying lengths, routing)."""
        engine, refused = self.store.engine, self._refused
        self._refused = engine.counters.refused
        needed = memory.host_bytes(plan, rank, self.footprints)
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
            "rank %d: activation sets have outgrown the host arena and stayed on the device; %s",
            dist.get_rank(),
            what,
        )

    def device_bytes(self, plan: Schedule, rank: int) -> int:
        """The most that the sets take on the device under ``plan``."""
        return memory.device_bytes(plan, rank, self.footprints)

    def of_chunks(self, of: Callable[[Footprint], int]) -> dict[int, int]:
        """Bytes of the set of a whole microbatch, by model chunk."""
        return memory.of_chunks(self.footprints, of)

    def close(self) -> None:
        """End copy threads, unpin memory, remove the hooks of the models' modules."""
        if self._filter is not None:
            self._filter.close()
        self.store.engine.close()

    def _residents(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()


def least_bytes(
    models: Sequence[Any], config: Any, shape: tuple[int, ...] | None, policy: OffloadPolicy
) -> int:
    """Bytes that any set of ``models`` copies to the host at least (see ``least_set_bytes``)."""
    if policy is not keep_nothing:
        return 0  # A policy may keep everything on the device.
    return min(memory.least_set_bytes(unwrapped(model), config, shape) for model in models)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turns what the offload package refuses into an error for the user."""
    try:
        yield
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None
