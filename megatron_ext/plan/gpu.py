"""Accelerators: compute, memory and link rates, how much of them is reached.

One file a device in ``gpus/``, which has the sources; a file of the user's own has the same form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from .._input import parse_json, read_text, reason, shown
from .model import PlanError

FORMAT = "megatron_ext/gpu@1"
_SHARES = ("efficiency", "stream", "attention", "collective")
_FREE = ("ramp", "units", "collective_s")  # numbers that may be 0: nothing is lost then

NODE = 8  # devices of one host, unless --gpus-per-node is given


@dataclass(frozen=True)
class Gpu:
    """One device. Where a number has a default, that is of a device without this loss.

    Attributes:
        name: how people call it.
        flops: peak 16-bit matrix FLOP/s, dense.
        memory_bytes: what a process finds on an empty device.
        bandwidth: of its memory, bytes/s.
        to_host, to_device: of the way to the host's memory and back, bytes/s, one direction alone.
        peer: to the other devices of the node, bytes/s each way.
        network: to another node, bytes/s each way.
        units: multiprocessors, which divide the tiles of a matrix product.
        efficiency: share of ``flops`` that endless matrix products reach.
        ramp: inner products that every tile of a matrix product loses to its start and end.
        stream: share of ``bandwidth`` that kernels between the products reach.
        attention: share of ``flops`` that attention reaches, forward and backward together.
        collective: share of the ring's rate that tensor-parallel collectives reach.
        collective_s: seconds of one of them beside its bytes, with the wait for the slowest rank.
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
    network: float = 50e9
    units: int = 0
    efficiency: float = 1.0
    ramp: float = 0.0
    stream: float = 1.0
    attention: float = 1.0
    collective: float = 1.0
    collective_s: float = 0.0
    devices_per_node: int = 8
    exchange: float = 0.0

    def with_(self, **changes: Any) -> Gpu:
        """The same with numbers that the user gave in place of the table's.

        Raises:
            PlanError: a rate that is not positive, or a share above 1.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        for name, value in given.items():
            least = value >= 0 if name in _FREE else value > 0
            if not least or (name in _SHARES and value > 1):
                limit = "a share, > 0 and <= 1" if name in _SHARES else "> 0"
                raise PlanError(f"the device's {name} must be {limit}, got {value}")
        return replace(self, **given)

    def ring(self, ranks: int, stride: int = 1) -> float:
        """Bytes/s of a ring, whose members in a node share its adapters.

        Args:
            ranks: members.
            stride: distance of neighbours in the numbering of ranks.
        """
        inside = min(ranks, max(1, self.devices_per_node // stride))
        return self.peer if inside == ranks else min(self.peer, self.network * inside)

    @property
    def has_rates_of_the_table(self) -> bool:
        """True if no number that times depend on differs from the table's device of this name."""
        known = GPUS.get(self.name)
        return known is not None and all(getattr(self, n) == getattr(known, n) for n in _TIMED)


_NUMBERS = tuple(each.name for each in fields(Gpu) if each.name != "name")
_WHOLE = ("memory_bytes", "units", "devices_per_node")
_NEEDED = ("flops", "memory_bytes", "bandwidth", "to_host", "to_device", "peer")
_TIMED = tuple(n for n in _NUMBERS if n not in ("memory_bytes", "to_host", "to_device"))


def gpu_from_json(data: Any, path: str) -> Gpu:
    """The device that a file describes.

    ``{"format": "megatron_ext/gpu@1", "name": "mine", "like": "H100", "numbers": {"flops": 9e14,
    "efficiency": {"value": 0.7, "sure": "measured", "source": "a benchmark"}}}``: names and units
    are those of ``Gpu``; what is missing is that of the device that ``like`` names.

    Raises:
        PlanError: another format, a number that is missing, unknown or out of range.
    """

    def refuse(reason: str) -> PlanError:
        return PlanError(f"{path} describes no device: {reason}")

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise refuse(f'its "format" must be "{FORMAT}"')
    name, numbers = data.get("name"), data.get("numbers")
    if not isinstance(name, str) or not name or not isinstance(numbers, dict):
        raise refuse('it needs a "name" and an object "numbers"')
    unknown = [key for key in numbers if key not in _NUMBERS]
    if unknown:
        raise refuse(f"unknown number {shown(unknown[0])}; give some of {', '.join(_NUMBERS)}")
    values = {}
    for key, entry in numbers.items():
        entry = entry if isinstance(entry, dict) else {"value": entry}
        value = entry.get("value")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise refuse(f"{key} must be a number, got {shown(value)}")
        values[key] = int(value) if key in _WHOLE else float(value)
    like = data.get("like")
    if not isinstance(like, str | None):
        raise refuse(f'"like" must be a name, got {shown(like)}')
    if like is None:
        missing = [key for key in _NEEDED if key not in values]
        if missing:
            raise refuse(f'it lacks {", ".join(missing)}, and names no device with "like"')
        base = Gpu("", 1.0, 1, 1.0, 1.0, 1.0, 1.0)
    elif like not in GPUS:
        raise refuse(f'"like" must be one of {", ".join(GPUS)}, got {shown(like)}')
    else:
        base = GPUS[like]
    return replace(base.with_(**values), name=name)


def _table() -> dict[str, Gpu]:
    for name in _NAMES:
        path = Path(__file__).parent / "gpus" / f"{name}.json"
        GPUS[name] = gpu_from_json(json.loads(path.read_text("utf-8")), path.name)
    return GPUS


# In an order in which each comes after the one that it is like.
_NAMES = ("A100", "A100-40GB", "H100", "H200", "B200", "B300", "GB200", "GB300", "MI300X")
GPUS: dict[str, Gpu] = {}


def gpu_of(name: str) -> Gpu:
    """A device of the table, whatever the case of its name, or of a file that ends in ``.json``.

    Raises:
        PlanError: it is not there, or the file describes none.
    """
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() in known:
        return known[name.lower()]
    if name.endswith(".json"):
        try:
            return gpu_from_json(parse_json(read_text(name)), name)
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"--gpu {name} cannot be read: {reason(error)}") from None
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"--gpu {name}: {error}") from None
    raise PlanError(
        f"unknown GPU {name!r}; give one of {', '.join(GPUS)}, or describe yours with "
        "--gpu-flops, --gpu-memory, --gpu-bandwidth and --host-bandwidth beside the nearest, "
        "or with --gpu FILE.json"
    )


_table()
