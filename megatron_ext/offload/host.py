"""Host memory of all ranks of a host, and the NUMA node of a device."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import OffloadConfigError
from .host_memory import GIB, read_number, text_of

# What the rest of the machine needs while training runs: page cache, data loader, checkpoints.
USABLE_FRACTION = 0.9


def require_host_memory(
    needed_bytes: Sequence[int],
    available_bytes: int,
) -> None:
    """Check that the host arenas of all ranks of one host fit together.

    Args:
        needed_bytes: of each rank on this host.
        available_bytes: ``available_host_bytes()`` before any of them was allocated.

    Raises:
        OffloadConfigError: they do not.
    """
    total, usable = sum(needed_bytes), int(available_bytes * USABLE_FRACTION)
    if total > usable:
        raise OffloadConfigError(
            f"offloading needs {total / GIB:.2f} GiB of pinned host memory for the "
            f"{len(needed_bytes)} ranks of this host (at most {max(needed_bytes) / GIB:.2f} GiB a "
            f"rank) but only {usable / GIB:.2f} GiB may be used ({USABLE_FRACTION:.0%} of "
            f"the {available_bytes / GIB:.2f} GiB available); offload less, use "
            "fewer microbatches in flight, or run fewer ranks per host"
        )


@contextlib.contextmanager
def bound_to_numa_node(pci_bus_id: str | None, root: Path = Path("/")) -> Iterator[None]:
    """Run the block on CPUs next to a PCI device, so that memory first touched there lies there.

    The binding ends with the block: only first touch matters to copies, and data loader workers
    should not inherit it. A binding from outside (numactl, taskset, a container's cpuset) always
    wins, and where the node is unknown nothing is changed. ``root`` is for tests.

    Args:
        pci_bus_id: as in ``/sys/bus/pci/devices``, such as ``0000:3b:00.0``; None: unknown.
    """
    before = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    cpus = frozenset() if pci_bus_id is None else _local_cpus(pci_bus_id, root)
    online = _cpu_list(text_of(root / "sys/devices/system/cpu/online"))
    changed = before == online and bool(cpus & before)
    if changed:
        os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        if changed:
            os.sched_setaffinity(0, before)


def host_pages(nbytes: int) -> torch.Tensor:
    """Zeroed host memory, 1-D uint8, that a fork does not inherit: pages that are copied on write
    are no longer those that a driver has pinned.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
    except (AttributeError, OSError):  # Not Linux.
        pages = mmap.mmap(-1, nbytes)
    return torch.frombuffer(pages, dtype=torch.uint8)


def pci_bus_id(device: torch.device) -> str | None:
    """The PCI address of a CUDA device as sysfs writes it; None for others."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    slot = properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _local_cpus(pci_bus_id: str, root: Path) -> frozenset[int]:
    """The CPUs of a device's NUMA node; none if the machine does not say."""
    place = root / "sys/bus/pci/devices" / pci_bus_id
    node = read_number(place / "numa_node")
    if node is None or node < 0:
        return frozenset()
    return _cpu_list(text_of(place / "local_cpulist"))


def _cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` as numbers."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
