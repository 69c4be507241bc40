"""Host memory of this machine, without torch."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process could still take, in bytes; all of it where nothing says."""
    stated = stated_host_bytes(root)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if stated is None else stated


def stated_host_bytes(root: Path) -> int | None:
    """The least of what the kernel says is available and what the control groups of this process
    (versions 1 and 2) still allow; None if neither says. ``root`` is ``/``, or a test's folder."""
    amounts = []
    for line in text_of(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    group = "/"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            group = path
    for folder, limit, used in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        place = root / folder / group.strip("/")
        # A container may see its own group as the root of the tree.
        for at in (place, root / folder):
            top, now = read_number(at / limit), read_number(at / used)
            if top is not None and now is not None:
                amounts.append(max(0, top - now))
                break
    return min(amounts, default=None)


def text_of(path: Path) -> str:
    """What is in a file; nothing if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The number in a file; None if there is none (``max`` means no limit)."""
    try:
        return int(text_of(path))
    except ValueError:
        return None
