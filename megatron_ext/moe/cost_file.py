"""Cost file: what ``auto`` found in one run, for another (``--moe-pipeline-costs``).

    {"format": "megatron-ext-moe-costs/2", "layers": "MoE layers of hidden size ...",
     "kept_bytes": 12288, "to_host": 4.0e-08, "to_device": 4.1e-08,
     "experts": [[4096, 0.0008]],
     "times": [[4096, 1, "none", 2, 0.0031], [4096, 4, "none", 2, 0.0024], ...]}

``kept_bytes`` is what the experts keep for backward per row besides their input, ``to_host`` and
``to_device`` are milliseconds a byte; null where they were not needed. A time is that of a call's
forward and backward pass: [tokens of the largest call of its bucket, chunks, strategy, lookahead,
milliseconds a token]. One chunk and none is Megatron's own layer. ``experts`` has the experts'
forward pass alone, [tokens, milliseconds a token]; it may be left out.

Files of ``megatron-ext-moe-costs/1``, which held costs of single operations, are still read: bytes
and copies count, the rest is timed in training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .._input import parse_json, read_text, real, shown, whole
from .plan import LayerPlan

FORMAT, OLD_FORMAT = "megatron-ext-moe-costs/2", "megatron-ext-moe-costs/1"
OLD_LINES = ("message", "experts", "experts_backward", "to_host", "to_device")
_FIELDS = ("format", "layers", "kept_bytes", "to_host", "to_device", "experts", "times")

Times = dict[int, dict[LayerPlan, float]]  # by bucket's largest tokens: milliseconds a token


@dataclass(frozen=True)
class Costs:
    """What is known of layers of one kind; see the module.

    Attributes:
        layers: which; "" means all.
        times: trials; empty where there were none.
        experts: milliseconds a token of their forward pass, by bucket's largest tokens.
    """

    layers: str = ""
    kept_bytes: float | None = None
    to_host: float | None = None
    to_device: float | None = None
    times: Times = field(default_factory=dict)
    experts: dict[int, float] = field(default_factory=dict)

    def dump(self) -> str:
        """The file's content, on one line."""
        times = [
            [tokens, plan.chunks, plan.strategy.value, plan.lookahead, time]
            for tokens, found in sorted(self.times.items())
            for plan, time in found.items()
            if time < float("inf")  # of a trial that no clock was read in
        ]
        experts = sorted(map(list, self.experts.items()))
        return json.dumps({"format": FORMAT, **vars(self), "experts": experts, "times": times})


def load(path: str) -> Costs:
    """Read a file.

    Raises:
        ValueError: it cannot be read or is not of a form above.
    """
    try:
        return parse(read_text(path))
    except OSError as error:
        raise ValueError(f"cannot read MoE costs {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"MoE costs {path}: {error}") from None


def parse(text: str) -> Costs:
    """From the file's content.

    Raises:
        ValueError: it is not of a form above.
    """
    data = parse_json(text)
    kind = data.get("format") if isinstance(data, dict) else None
    if kind not in (FORMAT, OLD_FORMAT):
        raise ValueError(f'expected an object with "format": "{FORMAT}"')
    known = _FIELDS if kind == FORMAT else ("format", "kept_bytes", *OLD_LINES)
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"{shown(unknown[0])} is not known")
    if kind == OLD_FORMAT:
        betas = {name: _line(data.get(name), name) for name in OLD_LINES}
        inside = real(data.get("kept_bytes"), "'kept_bytes'")
        return Costs("", inside, betas["to_host"], betas["to_device"])
    kept, to_host, to_device = (
        None if data.get(name) is None else real(data[name], f"'{name}'")
        for name in ("kept_bytes", "to_host", "to_device")
    )
    layers, rows = data.get("layers"), data.get("times")
    if not isinstance(layers, str) or not isinstance(rows, list):
        raise ValueError("'layers' must be a text and 'times' a list")
    times: Times = {}
    for row in rows:
        tokens, plan, time = _time(row)
        times.setdefault(tokens, {})[plan] = time
    experts = data.get("experts", [])
    if not isinstance(experts, list):
        raise ValueError("'experts' must be a list")
    return Costs(layers, kept, to_host, to_device, times, dict(map(_experts, experts)))


def _line(value: Any, name: str) -> float:
    """The slope of [alpha, beta, least]."""
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"'{name}' must be a list of three numbers, got {shown(value)}")
    return [real(number, f"'{name}'") for number in value][1]


def _experts(row: Any) -> tuple[int, float]:
    if not isinstance(row, list) or len(row) != 2:
        raise ValueError(f"a time of the experts is [tokens, ms], got {shown(row)}")
    return whole(row[0], "tokens"), real(row[1], "a time of the experts", positive=True)


def _time(row: Any) -> tuple[int, LayerPlan, float]:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[2], str):
        raise ValueError(f"a time is [tokens, chunks, strategy, lookahead, ms], got {shown(row)}")
    tokens, chunks, strategy, lookahead, time = row
    plan = LayerPlan.of(whole(chunks, "chunks", 1), strategy, whole(lookahead, "lookahead", 1))
    return whole(tokens, "tokens"), plan, real(time, "a time", positive=True)
