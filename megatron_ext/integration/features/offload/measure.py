"""Transfer policy and host link of a run, measured and agreed on by the ranks of a pipeline."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ....offload.arena import HostArena
from ....offload.device import Device, device_for
from ....offload.engine import Engine, FileLinkLock, Policy
from ....offload.host import pci_bus_id
from ....offload.pairs import Pairs, bridges, by_switch, in_all
from ....offload.rates import Rates
from ....schedule.link import Link, by_number, first_of_pair, travel_time
from ....schedule.placement import Placement
from ...callbacks import Duration
from ...measuring import measure_link, pass_seconds
from ...rules import Rule
from ...utils import gather, gather_over

NEIGHBOURS = Rule(
    "--pp-offload-transfer paired is for pipeline neighbours that share a PCIe switch",
    "ranks {i} and {j} are on different hosts ({one} and {other})",
    "use single or dual, or leave it out to measure",
)


@dataclass(frozen=True)
class TransferSetup:
    """How this rank transfers sets.

    Attributes:
        arena: host memory; what the measurement has pinned is there for the first sets.
        policy: the same on all ranks of a call.
        why: the reason for the policy.
        rates: of this rank; None if nothing had to be measured.
        pairs: of ranks that share a switch, for ``paired``; None: by number.
        link_lock: for ``paired`` on devices that need it.
    """

    device: Device
    arena: HostArena
    policy: Policy
    why: str
    rates: Rates | None = None
    pairs: Pairs | None = None
    link_lock: FileLinkLock | None = None

    def applied_to(self, link: Link) -> Link:
        """``link``'s times under the agreed policy and pairs."""
        paired = self.policy is Policy.PAIRED
        return replace(link, policy=self.policy.value, pairs=self.pairs if paired else None)

    def bytes_per_second(self) -> tuple[float, float] | None:
        """Measured rates to the host and back, under the policy."""
        if self.rates is None:
            return None
        if self.policy is Policy.DUAL:
            return self.rates.to_host_together, self.rates.to_device_together
        return self.rates.to_host, self.rates.to_device

    def engine(self, expected_sets: int) -> Engine:
        """A transfer engine, whose arena grows for so many sets.

        Raises:
            OffloadConfigError: the policy does not fit the machine.
        """
        self.arena.expect(max(1, expected_sets))
        return Engine(self.device, self.arena, self.policy, self.link_lock)

    def close(self) -> None:
        """End copies and threads, unpin host memory, where no engine does."""
        self.device.close()
        self.arena.close()


def choose_transfers(
    requested: str | None,
    measured: bool,
    torch_device: torch.device,
    groups: Sequence[Any],
    planned: Link | None = None,
    root: Path = Path("/"),
) -> TransferSetup:
    """Measure the link where that is needed, and agree on the transfer policy.

    All ranks of ``groups`` must call this together, and get one policy.

    Args:
        requested: the policy of the user or of a file; None: what measurements show to be best.
        groups: of the call, the pipeline first.
        measured: True if rates are needed to plan.
        planned: of a schedule file, whose plan has its pairs already.
        root: ``/``, or the folder where a test keeps its PCI tree.

    Raises:
        ConfigError: ``paired`` is requested, no two ranks share a switch that can be read, and
            neighbours are on different hosts.
    """
    group = groups[0]
    rank, place = group.rank(), (socket.gethostname(), bridges(pci_bus_id(torch_device), root))
    places = gather(place, group)
    pairs, why_pairs = None, "paired as the schedule file has it"
    if planned is not None:
        pairs = planned.pairs
    elif requested in (None, Policy.PAIRED):
        pairs, why_pairs = in_all(gather_over(by_switch(places), groups))
    used = by_number(len(places)) if pairs is None else pairs
    apart = next(((i, j) for i, j in used if places[i][0] != places[j][0]), None)
    if requested == Policy.PAIRED and apart is not None:
        i, j = apart
        raise NEIGHBOURS.broken(i=i, j=j, one=places[i][0], other=places[j][0])
    device, arena = device_for(torch_device), HostArena(torch_device)
    rates, choice, why = None, requested, "as requested"
    if measured or requested is None:
        neighbours = () if apart else used
        rates, (best, reason) = measure_link(rank, neighbours, device, arena, group)
        votes = gather_over((best.value, reason), groups)
        if requested is None:
            choice = _consensus([vote for vote, _ in votes])
            first = next(i for i, (vote, _) in enumerate(votes) if vote == choice)
            why = f"measured: on rank {first}, {votes[first][1]}"
    policy = Policy(choice)
    if policy is Policy.PAIRED:
        why += f"; {why_pairs}"
    lock = _link_lock(policy, device, rank, first_of_pair(pairs, rank), group)
    return TransferSetup(device, arena, policy, why, rates, pairs, lock)


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
    assert rates is not None
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
    return setup.applied_to(Link.of_stages(placement, to_host, to_device))


def _consensus(votes: Sequence[str]) -> str:
    """One policy for all: one vote suffices for ``paired``, ``dual`` needs all of them."""
    if Policy.PAIRED in votes:
        return Policy.PAIRED.value
    return Policy.DUAL.value if set(votes) == {Policy.DUAL.value} else Policy.SINGLE.value


def _link_lock(
    policy: Policy, device: Device, rank: int, first: int, group: Any
) -> FileLinkLock | None:
    """Locks that each pair shares, where the device can hold them."""
    if policy is not Policy.PAIRED or not device.guards_copies:
        return None
    folder = None
    if rank == first:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = tempfile.mkdtemp(prefix="megatron-ext-link-lock-", dir=memory)
    lock = FileLinkLock(Path(gather(folder, group)[first]))
    gather(None, group)  # both of a pair have their files
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return lock
