"""Facts about the machine without torch: GPUs on the PCI bus, NUMA nodes, environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...offload.host_memory import read_number, text_of

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor; first byte of the class: display controllers


@dataclass(frozen=True)
class Gpu:
    """One GPU as the kernel sees it.

    Attributes:
        bus: its PCI address, such as ``0000:3b:00.0``.
        node: its NUMA node; None where the machine does not report it.
        link: speed and width now, such as ``32.0 GT/s x16``; a sleeping link is slower.
        root: address of the root port that it hangs on; GPUs with the same one share its rate.
    """

    bus: str
    node: int | None
    link: str
    root: str


def gpus(root: Path) -> list[Gpu]:
    """NVIDIA's GPUs in sysfs, by address. ``root`` is ``/``, or a test's folder."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if text_of(device / "vendor") != _NVIDIA or not text_of(device / "class").startswith(
            _DISPLAY
        ):
            continue
        speed = text_of(device / "current_link_speed").removesuffix(" PCIe")
        width = text_of(device / "current_link_width")
        link = f"{speed} x{width}" if speed and width else "unknown link"
        # .../pci0000:3a/0000:3a:01.0/0000:3b:00.0: the second part is the root port.
        path = [p for p in device.resolve().parts if re.fullmatch(r"[0-9a-f]{4,}:.*\.\d", p)]
        node = read_number(device / "numa_node")
        node = node if node is not None and node >= 0 else None
        found.append(Gpu(device.name, node, link, path[0] if path else device.name))
    return found


def numa_nodes(root: Path) -> list[int]:
    """Numbers of the machine's NUMA nodes; empty where the kernel does not report them."""
    names = (path.name for path in (root / "sys/devices/system/node").glob("node[0-9]*"))
    return sorted(int(name.removeprefix("node")) for name in names)


def driver() -> tuple[str | None, str]:
    """(the NVIDIA driver's version or None, why there is none)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "there is no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi: {error}"
    lines = done.stdout.split()
    if done.returncode != 0 or not lines:
        return None, f"nvidia-smi: {(done.stderr or done.stdout).strip() or 'no answer'}"
    return lines[0], ""


# Variable (a pattern), bad values (a pattern), effect, fix.
_ON = r"[1-9].*"
_CONFLICTS = (
    ("CUDA_DEVICE_MAX_CONNECTIONS", r"1",
     "one hardware queue: messages, offload copies and MoE chunks wait for the kernels before "
     "them",
     "with tensor and context parallelism 1 or on Blackwell, set 32; else Megatron demands 1"),
    ("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel: nothing overlaps", "unset it"),
    ("(TORCH_)?NCCL_BLOCKING_WAIT", _ON,
     "the host waits in every message, so passes no longer hide them", "unset it"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", r"0",
     "with torch before 2.8, memory of collectives stays allocated for longer than the plan counts",
     "unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", r".+",
     "every allocation of an activation set synchronizes the device", "unset it"),
    ("NCCL_P2P_DISABLE", _ON,
     "neighbouring ranks of a node communicate through the host, which offload needs",
     "unset it, unless your machine hangs without it"),
    ("MEGATRON_EXT_TRACE", _ON, "every action is printed as it starts, which costs time",
     "unset it when you do not look for a hang"),
)  # fmt: skip


def conflicts(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(``NAME=value``, effect, fix) of variables that work against a schedule."""
    return [
        (f"{name}={value}", effect, fix)
        for pattern, bad, effect, fix in _CONFLICTS
        for name, value in sorted(environment.items())
        if re.fullmatch(pattern, name) and re.fullmatch(bad, value)
    ]


def cpus_bound() -> tuple[int, int]:
    """(CPUs that this process may use, CPUs of the machine)."""
    total = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)), total
    return total, total
