"""Pairs of pipeline ranks whose devices share a PCIe switch, from the tree that sysfs shows.

PipeOffload, appendix D: two devices behind one switch share its way to the host, so they should not
copy the same way at once. Without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

Pairs = tuple[tuple[int, int], ...]

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def bridges(pci_bus_id: str | None, root: Path = Path("/")) -> tuple[str, ...] | None:
    """PCI addresses of the bridges between the host and a device, the root port first.

    Args:
        pci_bus_id: as in ``/sys/bus/pci/devices``, such as ``0000:3b:00.0``; None: unknown.
        root: ``/``, or a test's folder.

    Returns:
        None where sysfs does not have the device; empty for a device without bridges, as virtual
        machines show them.
    """
    place = root / "sys/bus/pci/devices" / (pci_bus_id or "unknown")
    if not place.exists():
        return None
    return tuple(part for part in place.resolve().parts if _ADDRESS.fullmatch(part))[:-1]


def by_switch(places: Sequence[tuple[str, tuple[str, ...] | None]]) -> Pairs | None:
    """Ranks of one host that share bridges, those that share most first, neighbours first.

    Args:
        places: per pipeline rank, its host and the bridges above its device.

    Returns:
        At most one pair a rank; None where some rank's bridges are unknown.
    """
    shared = []
    for a, b in combinations(range(len(places)), 2):
        (host, mine), (other, its) = places[a], places[b]
        if mine is None or its is None:
            return None
        # A root port or a bridge is above whole subtrees: what two paths share is their start.
        depth = len({*mine} & {*its})
        if host == other and depth:
            shared.append((-depth, b - a, a, b))
    found: list[tuple[int, int]] = []
    taken: set[int] = set()
    for _, _, a, b in sorted(shared):
        if not {a, b} & taken:
            taken |= {a, b}
            found.append((a, b))
    return tuple(sorted(found))


def in_all(votes: Sequence[Pairs | None]) -> tuple[Pairs | None, str]:
    """The pairs that all pipelines of the job have, since all follow one plan; and the reason.

    Args:
        votes: every rank's result of ``by_switch`` for its pipeline.

    Returns:
        None: pair by number, ranks 2i and 2i+1.
    """
    known = [vote for vote in votes if vote is not None]
    if len(known) < len(votes):
        return None, "paired by number: the PCI tree cannot be read on every rank"
    common = tuple(sorted(set(known[0]).intersection(*known)))
    if not common:
        return None, "paired by number: no two ranks share a PCIe switch in all pipelines"
    text = ", ".join(f"{a} and {b}" for a, b in common)
    return common, f"paired by PCIe switch: ranks {text}"
