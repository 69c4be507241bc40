"""Accelerators: compute, memory and link rates, and the source of each number."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from .model import PlanError

_GB, _TFLOP = 10**9, 10**12


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        name: how people call it.
        flops: peak 16-bit matrix FLOP/s, dense.
        memory_bytes: what a process finds on an empty device.
        bandwidth: of its memory, bytes/s.
        to_host, to_device: of the way to the host's memory and back, bytes/s, one direction alone.
        peer: to another device of the node, bytes/s each way.
        network: to another node, bytes/s each way.
        efficiency: share of ``flops`` that large matrix products reach.
        sources: where each number is from, by its name here.
        devices_per_node: that the peer link connects.
        exchange: of all-to-alls of experts' rows, bytes/s; 0: by the two links.
    """

    name: str
    flops: float
    memory_bytes: int
    bandwidth: float
    to_host: float
    to_device: float
    peer: float
    network: float = 50 * _GB
    efficiency: float = 0.6
    sources: tuple[tuple[str, str], ...] = ()
    devices_per_node: int = 8
    exchange: float = 0.0

    def with_(self, **changes: Any) -> Gpu:
        """The same with numbers that the user gave in place of the table's."""
        given = {name: value for name, value in changes.items() if value is not None}
        for name, value in given.items():
            if value <= 0 or (name == "efficiency" and value > 1):
                limit = "a share, > 0 and <= 1" if name == "efficiency" else "> 0"
                raise PlanError(f"the device's {name} must be {limit}, got {value}")
        sources = dict(self.sources) | dict.fromkeys(given, "given")
        return replace(self, **given, sources=tuple(sources.items()))

    @property
    def has_rates_of_the_table(self) -> bool:
        """True if the user has replaced no number that times depend on."""
        given = {name for name, source in self.sources if source == "given"}
        rates = {"flops", "bandwidth", "peer", "network", "efficiency"}
        return not given & {*rates, "devices_per_node", "exchange"}

    def assumptions(self) -> list[str]:
        """One sentence a number."""
        return [f"{self.name}, {name}: {source}" for name, source in self.sources]


_LINK = "PCIe Gen{0} x16 carries {1} GB/s each way by its standard; {2} is assumed to arrive"
_MEASURED_LINK = (
    "what PipeOffload's authors reached with {0}, copies alternating on one stream (arXiv "
    "2503.01328, section 3, and their code); a link of its own carries more: measure"
)
_EFFICIENCY = "assumed, not measured; calibrate with --efficiency or a profile"
_NETWORK = "assumed, one 400 Gb/s adapter a device"


def _sources(sheet: str, link: str, efficiency: str = _EFFICIENCY) -> tuple[tuple[str, str], ...]:
    return (
        ("flops", f"{sheet}, dense, without sparsity"),
        ("memory_bytes", f"{sheet}, about what nvidia-smi shows as total"),
        ("bandwidth", sheet),
        ("to_host and to_device", link),
        ("peer", f"{sheet}, half of NVLink's sum of both directions"),
        ("network", _NETWORK),
        ("efficiency", efficiency),
    )


def _sheet(name: str) -> str:
    return f"NVIDIA's data sheet of the {name}"


_A100 = _sources(
    _sheet("A100 SXM"),
    _MEASURED_LINK.format("A100 (15 GB/s)"),
    "220 of 312 TFLOP/s, PipeOffload's B_c (arXiv 2503.01328, formula 1 and figure 1)",
)
_GEN5 = _LINK.format(5, 63, "50 GB/s")
_C2C = (
    "NVLink-C2C carries 450 GB/s each way to one Grace CPU with its memory, for two devices; "
    "150 GB/s a device are assumed to arrive"
)

GPUS: dict[str, Gpu] = {
    "A100": Gpu(
        *("A100", 312 * _TFLOP, 80 * 2**30, 2039 * _GB, 15 * _GB, 15 * _GB, 300 * _GB),
        efficiency=0.7,
        sources=_A100,
    ),
    "A100-40GB": Gpu(
        *("A100-40GB", 312 * _TFLOP, 40 * 2**30, 1555 * _GB, 15 * _GB, 15 * _GB, 300 * _GB),
        efficiency=0.7,
        sources=_A100,
    ),
    "H100": Gpu(
        *("H100", 989 * _TFLOP, 79 * 2**30, 3350 * _GB, 21 * _GB, 21 * _GB, 450 * _GB),
        sources=_sources(_sheet("H100 SXM"), _MEASURED_LINK.format("H100 (21 GB/s)")),
    ),
    "H200": Gpu(
        *("H200", 989 * _TFLOP, 139 * 2**30, 4800 * _GB, 50 * _GB, 50 * _GB, 450 * _GB),
        sources=_sources(_sheet("H200 SXM"), _GEN5),
    ),
    "B200": Gpu(
        *("B200", 2250 * _TFLOP, 178 * 2**30, 7700 * _GB, 50 * _GB, 50 * _GB, 900 * _GB),
        sources=_sources(_sheet("B200 in a DGX or HGX"), _GEN5),
    ),
    "B300": Gpu(
        *("B300", 2250 * _TFLOP, 268 * 2**30, 7700 * _GB, 50 * _GB, 50 * _GB, 900 * _GB),
        sources=_sources(_sheet("B300 in a DGX or HGX"), _GEN5),
    ),
    "GB200": Gpu(
        *("GB200", 2500 * _TFLOP, 185 * 2**30, 7700 * _GB, 150 * _GB, 150 * _GB, 900 * _GB),
        sources=_sources(_sheet("GB200 NVL72"), _C2C),
        devices_per_node=72,
    ),
    "GB300": Gpu(
        *("GB300", 2500 * _TFLOP, 277 * 2**30, 7700 * _GB, 150 * _GB, 150 * _GB, 900 * _GB),
        sources=_sources(_sheet("GB300 NVL72"), _C2C),
        devices_per_node=72,
    ),
}


def gpu_of(name: str) -> Gpu:
    """A device of the table, whatever the case of its name.

    Raises:
        PlanError: it is not there.
    """
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise PlanError(
            f"unknown GPU {name!r}; give one of {', '.join(GPUS)}, or describe yours with "
            "--gpu-flops, --gpu-memory, --gpu-bandwidth and --host-bandwidth beside the nearest"
        )
    return known[name.lower()]


def gpu_called(name: str) -> Gpu | None:
    """The device of the table that a driver calls ``name``, such as "NVIDIA H100 80GB HBM3".

    Cards on PCIe (``H100 PCIe``, ``H100 NVL``) count as the SXM module of their name: their rates
    are lower, the ratios of their passes about the same. None for every other device.
    """
    words = re.findall(r"[A-Z0-9]+", name.upper())
    key = next((word for word in words if word in GPUS), None)
    if key == "A100" and "40GB" in words:
        key = "A100-40GB"
    return None if key is None else GPUS[key]
