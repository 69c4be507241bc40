"""PipeOffload inside Megatron: activation sets travel as the schedule says (docs/10).

The first step is also a measurement: of what a set takes, and, unless ``--pp-offload-time`` says
it, of how long passes and copies take. From the second step on the plan is made for that, and the
host arena has exactly the size that the plan needs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ....offload.arena import HostArena, arena_bytes
from ....offload.device import CpuDevice, CudaDevice, Device
from ....offload.engine import Engine
from ....offload.errors import OffloadConfigError
from ....offload.host_memory import GIB
from ....offload.sets import Footprint
from ....offload.store import MIN_BYTES, ActivationStore
from ....schedule.actions import Op
from ....schedule.effects import passes
from ....schedule.link import Link
from ....schedule.passes.check import CheckReport, check
from ....schedule.placement import Placement
from ....schedule.schedule import Schedule
from ...errors import ConfigError
from ...utils import unwrapped
from ..profile import Seconds
from . import measure as offload_measure
from .measure import TransferSetup
from .request import OffloadRequest

logger = logging.getLogger(__name__)

MIN_BYTES_ENVIRONMENT = "MEGATRON_EXT_OFFLOAD_MIN_BYTES"
# Until it is measured: fast enough to keep memory low, and late copies only cost the first step.
_ASSUMED = "0.25"
# When sets have outgrown the arena, the next ones may be larger still.
_SLACK = 8

Key = tuple[int, int]


class Offloading:
    """Moves the activation sets of one rank, one training step after the other.

    Args:
        request: what the user wants; None if a schedule file says it all.
        link: of that file.
        trace: count bytes of the sets that stay, too.

    Attributes:
        link: what the next plan is to be made with.
    """

    def __init__(self, request: OffloadRequest | None, link: Link | None, trace: bool) -> None:
        self._request, self._file_link, self._trace = request, link, trace
        self.link = link
        self._transfers: TransferSetup | None = None
        self._store: ActivationStore | None = None
        self._device: Device | None = None
        self._models: Sequence[torch.nn.Module] = ()
        self._footprints: dict[int, Footprint] = {}
        self._plan: Schedule | None = None
        self._checked: tuple[Schedule, CheckReport] | None = None
        self._leaving: frozenset[Key] = frozenset()
        self._saved: set[Key] = set()
        self._steps = self._refused = 0
        self._known = request is None or request.known

    # --- once a step, all ranks of the pipeline together ---

    def begin(self, models: Sequence[torch.nn.Module], group: Any) -> None:
        """Before the step is planned; the first time, measure the link and agree on the policy.

        Raises:
            ConfigError: the policy does not fit the machine.
        """
        self._models = models
        if self._transfers is not None:
            return
        parameter = next(models[0].parameters())
        cuda = parameter.device.type == "cuda"
        self._device = CudaDevice(parameter.device) if cuda else CpuDevice()
        if self._request is None:
            assert self._file_link is not None
            asked: str | None = self._file_link.policy
        else:
            asked = self._request.policy
        measured = self._request is not None and not self._request.known
        with _as_config_error():
            self._transfers = offload_measure.settle(asked, measured, self._device, group)
        if self._request is not None:
            policy = self._transfers.policy.value
            given = self._request.link(group.size(), policy)
            self.link = given or Link.of(group.size(), _ASSUMED, policy=policy)

    @property
    def assumed(self) -> bool:
        """True as long as transfer times are neither given nor measured."""
        return not self._known

    def start(self, plan: Schedule, rank: int, config: Any, shape: tuple[int, ...] | None) -> None:
        """Before the step: which sets leave. Makes room for a plan that is new.

        Args:
            plan: lowered.
            rank: of this process in the pipeline.
            config: Megatron's model configuration.
            shape: of what travels between stages; None: it varies.

        Raises:
            ConfigError: the host lacks the memory.
        """
        row = plan.ranks[rank]
        self._saved.clear()
        if plan is not self._plan:
            self._leaving = frozenset(
                (plan.placement.chunk_of(a.stage), a.microbatch)
                for a in passes(row)
                if a.op is Op.OFFLOAD
            )
            self._plan = plan
            if self._store is None:
                self._make_store(plan, rank, config, shape)
            else:
                self._fit(plan, rank)
        assert self._store is not None
        self._store.reset_peaks()

    def end(self, plan: Schedule, rank: int, replaced: bool) -> None:
        """After the step's last pass.

        Args:
            plan, rank: as for ``start``.
            replaced: another plan comes next, with its own size of the arena.

        Raises:
            RuntimeError: a set was never finished.
        """
        assert self._store is not None
        self._store.end_step()
        self._steps += 1
        if replaced:
            pass
        elif self._steps == 1:
            self._fit(plan, rank)
        elif self._store.engine.counters.refused > self._refused:
            self._enlarge(plan, rank)
        self._refused = self._store.engine.counters.refused

    def measured(self, seconds: Seconds, placement: Placement, rank: int) -> None:
        """Take measured times into the next plans: ``link`` changes if it was assumed.

        Args:
            seconds: of this rank's passes, rather too short than too long.
            placement: of the stages.
            rank: this one's, in the pipeline.
        """
        if self._known:
            return
        assert self._transfers is not None
        bytes_of = {chunk: footprint.host for chunk, footprint in self._footprints.items()}
        self.link = offload_measure.link(self._transfers, placement, rank, seconds, bytes_of)
        self._known = True

    @property
    def set_bytes(self) -> dict[int, int]:
        """By chunk, what a set takes on the device from F to B if it stays."""
        return {chunk: footprint.here for chunk, footprint in self._footprints.items()}

    @property
    def rates(self) -> tuple[float, float] | None:
        """Bytes/s to the host and back; None if they were not measured."""
        setup = self._transfers
        known = setup is not None and setup.rates is not None
        return offload_measure.ways(setup) if setup is not None and known else None

    def clear(self) -> None:
        """After an exception: forget all sets."""
        if self._store is not None:
            self._store.clear()

    def close(self) -> None:
        """End copy threads, unpin memory."""
        if self._store is not None:
            self._store.engine.close()
            self._store = None
        elif self._device is not None:
            self._device.close()
        self._transfers = None

    # --- for the runner, see ``Mover`` ---

    def saving(self, key: Key) -> AbstractContextManager[None]:
        """Around F."""
        if not (key in self._leaving or self._trace or self._steps == 0):
            return nullcontext()
        return self._save(key)

    def move(self, op: Op, key: Key) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD."""
        store = self._store
        assert store is not None
        if op is Op.OFFLOAD:
            with _as_config_error():
                store.offload(key, self._footprints[key[0]].host)
        else:
            getattr(store, op.value.lower())(key)

    def finish(self, key: Key) -> None:
        """After W or BW."""
        if key in self._saved:
            assert self._store is not None
            self._saved.remove(key)
            self._store.finish(key)

    def leaves(self, key: Key) -> bool:
        """True if the set is offloaded in this step."""
        return key in self._leaving

    def sets_away(self) -> int:
        """Sets that take no device memory now."""
        return 0 if self._store is None else len(self._store) - self._store.device_sets()

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter that a tensor from autograd is, or itself."""
        return tensor if self._store is None else self._store.parameter(tensor)

    # --- what to tell ---

    def summary(self, plan: Schedule, rank: int) -> dict[str, Any]:
        """Planned and measured numbers of the step, for the trace."""
        assert self._store is not None and self._transfers is not None
        report = self._report(plan)
        return {
            **self._store.report(),
            "policy": self._transfers.policy.value,
            "planned_host_sets": report.peak_host_sets[rank] if report.peak_host_sets else 0,
            "planned_device_bytes": self._planned_device_bytes(plan, rank),
        }

    def describe(self, plan: Schedule) -> str:
        """One sentence for the log: what leaves, how fast, what it takes."""
        assert self._transfers is not None and self.link is not None
        report = self._report(plan)
        times = ",".join(f"{float(max(t)):.3g}" for t in (self.link.to_host, self.link.to_device))
        sets = plan.pp * plan.chunks * plan.microbatches
        return (
            f"offload{', until it is measured' if self.assumed else ''}: "
            f"{sum(report.offloaded_sets)} of {sets} activation sets a step leave the device; at "
            f"most {max(report.peak_sets)} sets on a device, "
            f"{max(report.peak_host_sets, default=0)} of a rank on the host; transfer "
            f"{self._transfers.policy.value} ({self._transfers.why}); one set takes at most "
            f"{times} of its chunk's F+B+W each way ({'assumed' if self.assumed else 'known'}; "
            "--pp-offload-time)"
        )

    # --- the rest ---

    def _report(self, plan: Schedule) -> CheckReport:
        if self._checked is None or self._checked[0] is not plan:
            self._checked = plan, check(plan)
        return self._checked[1]

    def _make_store(
        self, plan: Schedule, rank: int, config: Any, shape: tuple[int, ...] | None
    ) -> None:
        assert self._device is not None and self._transfers is not None
        peaks = self._report(plan).peak_host_sets
        sets = peaks[rank] if peaks else 0
        least = [offload_measure.least_set_bytes(unwrapped(m), config, shape) for m in self._models]
        offload_measure.require_memory_on_hosts(sets * min(least))
        with _as_config_error():
            arena = HostArena(self._device.torch_device, expected_sets=max(1, sets))
            engine = Engine(
                self._device, arena, self._transfers.policy, turns=self._transfers.turns
            )
        least_bytes = int(os.environ.get(MIN_BYTES_ENVIRONMENT, MIN_BYTES))
        self._store = ActivationStore(engine, self._residents, min_bytes=least_bytes)

    def _residents(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            # Megatron's data-parallel wrapper has other buffers by that name.
            inner = unwrapped(model)
            yield from inner.parameters()
            yield from inner.buffers()

    @contextmanager
    def _save(self, key: Key) -> Iterator[None]:
        store = self._store
        assert store is not None
        with store.saving(key):
            yield
        self._saved.add(key)
        known = self._footprints.get(key[0], Footprint())
        self._footprints[key[0]] = known.union(store.footprint(key))

    def _needed_bytes(self, plan: Schedule, rank: int) -> int:
        moves = []
        for op, stage, microbatch in passes(plan.ranks[rank]):
            if op is Op.OFFLOAD or op is Op.RELOAD:
                footprint = self._footprints.get(plan.placement.chunk_of(stage), Footprint())
                moves.append(((stage, microbatch), footprint.host))
        return arena_bytes(moves)

    def _fit(self, plan: Schedule, rank: int) -> None:
        """Give the arena the size that ``plan`` needs; all ranks of the job together."""
        assert self._store is not None
        engine, needed = self._store.engine, self._needed_bytes(plan, rank)
        engine.synchronize()
        offload_measure.require_memory_on_hosts(needed, engine.arena.capacity_bytes)
        if needed != engine.arena.capacity_bytes:
            with _as_config_error():
                engine.arena.resize(needed)

    def _enlarge(self, plan: Schedule, rank: int) -> None:
        """Sets have grown since the arena was made (varying lengths, routing)."""
        assert self._store is not None
        engine, needed = self._store.engine, self._needed_bytes(plan, rank)
        needed += needed // _SLACK
        if needed <= engine.arena.capacity_bytes:
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

    def _planned_device_bytes(self, plan: Schedule, rank: int) -> int:
        """The most that the sets take on the device, by the plan and each chunk's footprint."""
        now = most = 0
        for op, stage, microbatch in passes(plan.ranks[rank]):
            chunk = plan.placement.chunk_of(stage)
            f, leaves = self._footprints.get(chunk, Footprint()), (chunk, microbatch)
            if op is Op.F:
                now += f.here
            elif op is Op.RELEASE:
                now -= f.here - f.away
            elif op is Op.PREPARE:
                now += f.back - f.away
            elif op is Op.W or op is Op.BW:
                now -= f.back if leaves in self._leaving else f.here
            most = max(most, now)
        return most


@contextmanager
def _as_config_error() -> Iterator[None]:
    """What the offload package refuses, the user can mend."""
    try:
        yield
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None
