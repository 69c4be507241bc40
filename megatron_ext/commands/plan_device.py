"""The device and the budget of ``plan``."""

from __future__ import annotations

import argparse

from .._input import parse_bytes
from ..plan.gpu import GPUS, Gpu, gpu_of
from ..plan.model import PlanError
from .parser import Options, Parser

_DEVICE = Options(
    {
        "--gpu GPU": f"{', '.join(GPUS)} (default H100), or FILE.json",
        "--memory-cap BYTES": "the most that one rank may hold on its device, such as 40GiB "
        "(default: the device's memory less the reserve)",
        "--reserve BYTES": "memory for libraries, communicators and fragmentation, if there is no "
        "--memory-cap (default 6GiB)",
        "--host-memory BYTES": "host memory for a rank's offloaded sets",
        "--gpu-flops X": "peak dense 16-bit FLOP/s",
        "--gpu-memory BYTES": "memory of the device",
        "--gpu-bandwidth X": "memory bandwidth, bytes/s",
        "--host-bandwidth X[,X2]": "bandwidth to the host, and back, bytes/s",
        "--peer-bandwidth X": "bandwidth in a node, bytes/s",
        "--network-bandwidth X": "between nodes, bytes/s each way",
        "--exchange-bandwidth X": "measured rate, in bytes/s, at which a device's rows reach the "
        "experts of other ranks, for example with DeepEP",
        "--efficiency X": "share of the peak that large matrix products reach",
    },
    kinds=dict.fromkeys(
        (
            *("--gpu-flops", "--gpu-bandwidth", "--peer-bandwidth"),
            *("--network-bandwidth", "--exchange-bandwidth", "--efficiency"),
        ),
        float,
    ),
    defaults={"--gpu": "H100", "--reserve": "6GiB"},
)


def declare(parser: Parser) -> None:
    """What describes the device and the budget."""
    parser.declare("device and budget", _DEVICE)


def gpu(args: argparse.Namespace) -> Gpu:
    """The device, with the rates that were given."""
    there: float | None = None
    back: float | None = None
    if args.host_bandwidth is not None:
        parts = args.host_bandwidth.split(",")
        try:
            there, back = float(parts[0]), float(parts[-1])
        except ValueError:
            there = None
        if there is None or len(parts) > 2:
            raise PlanError(
                f"--host-bandwidth must be X or X,X2 in bytes/s, got {args.host_bandwidth!r}"
            )
    return gpu_of(args.gpu).with_(
        flops=args.gpu_flops,
        memory_bytes=None if args.gpu_memory is None else parse_bytes(args.gpu_memory),
        bandwidth=args.gpu_bandwidth,
        to_host=there,
        to_device=back,
        peer=args.peer_bandwidth,
        network=args.network_bandwidth,
        efficiency=args.efficiency,
        devices_per_node=args.gpus_per_node,
        exchange=args.exchange_bandwidth,
    )


_LEAST = 1 << 20  # of a device; a smaller number has lost its unit


def _bytes(text: str, flag: str) -> int:
    size = parse_bytes(text)
    if size < _LEAST:
        unit = f"; write {text.strip()}GiB?" if text.strip().isdigit() else ", less than 1 MiB"
        raise PlanError(f"{flag} {text} is {size} bytes{unit}")
    return size


def budgets(args: argparse.Namespace, gpu: Gpu) -> tuple[int, int | None]:
    """Bytes of a rank on the device, and on the host (None: no limit)."""
    host = None if args.host_memory is None else _bytes(args.host_memory, "--host-memory")
    if args.memory_cap is not None:
        return _bytes(args.memory_cap, "--memory-cap"), host
    budget = gpu.memory_bytes - parse_bytes(args.reserve)
    if budget <= 0:
        raise PlanError(f"--reserve {args.reserve} leaves nothing of {gpu.name}'s memory")
    return budget, host
