"""The host link of a run, measured by the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....offload.arena import HostArena
from ....offload.device import Device, device_for
from ....offload.engine import Engine
from ....offload.rates import Rates
from ....schedule.link import Link, travel_time
from ....schedule.placement import Placement
from ...callbacks import Duration
from ...measuring import measure_link, pass_seconds
from ...utils import gather_over


@dataclass(frozen=True)
class TransferSetup:
    """How this rank transfers sets.

    Attributes:
        arena: host memory; what the measurement has pinned is there for the first sets.
        rates: of this rank; None if nothing had to be measured.
    """

    device: Device
    arena: HostArena
    rates: Rates | None = None

    @classmethod
    def of(cls, measured: bool, torch_device: torch.device, group: Any) -> TransferSetup:
        """Measure the link where its rates are needed to plan (``measured``), on all ranks of the
        pipeline ``group`` together.

        Raises:
            OffloadConfigError: the host lacks the memory.
        """
        device, arena = device_for(torch_device), HostArena(torch_device)
        rates = measure_link(group.rank(), device, arena, group) if measured else None
        return cls(device, arena, rates)

    def bytes_per_second(self) -> tuple[float, float]:
        """Measured rates to the host and back, both at once."""
        assert self.rates is not None
        return self.rates.to_host_together, self.rates.to_device_together

    def engine(self, expected_sets: int) -> Engine:
        """A transfer engine, whose arena grows for so many sets."""
        self.arena.expect(max(1, expected_sets))
        return Engine(self.device, self.arena)

    def close(self) -> None:
        """End copies and threads, unpin host memory, where no engine does."""
        self.device.close()
        self.arena.close()


def link(
    setup: TransferSetup,
    placement: Placement,
    rank: int,
    durations: Sequence[Duration],
    sizes: Mapping[int, int],
    groups: Sequence[Any],
) -> Link:
    """The measured link of all stages, for planning; all ranks of ``groups`` call this together.

    Of ranks that hold the same stage the slowest counts: all follow one plan.

    Args:
        setup: of this rank, with rates.
        sizes: per chunk, bytes of a set that are copied.
        groups: of the call.
    """
    rates = setup.bytes_per_second()
    # A pass may have waited for a copy; that must not make the link look fast.
    seconds = pass_seconds(durations, min)
    mine = {}
    for chunk, stage in enumerate(placement.stages[rank]):
        whole = sum(time for (of, _), time in seconds.items() if of == chunk)
        mine[stage] = [travel_time(sizes.get(chunk, 0), rate, whole) for rate in rates]
    every = gather_over(mine, groups)
    to_host, to_device = zip(
        *(
            map(max, zip(*(part[stage] for part in every if stage in part)))
            for stage in range(placement.num_stages)
        )
    )
    return Link.of_stages(placement, to_host, to_device)
