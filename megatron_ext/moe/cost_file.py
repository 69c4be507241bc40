"""Costs of an MoE layer as a file: what one run measured, given to another.

    {"format": "megatron-ext-moe-costs/1",
     "message": [0.02, 2.1e-08, 0.03],
     "experts": [0.05, 1.4e-04, 0.1],
     "experts_backward": [0.08, 2.9e-04, 0.1],
     "to_host": [0.01, 4.0e-08, 0.0],
     "to_device": [0.01, 4.0e-08, 0.0],
     "kept_bytes": 12288}

Each list is alpha, beta, and the least: an operation takes max(least, alpha + beta * volume)
milliseconds. Volumes are rows for the experts, bytes that leave a rank for a message, and bytes for
copies. ``kept_bytes`` is what the experts keep for backward per row besides their input.
"""

from __future__ import annotations

import json
from typing import Any

from .._input import parse_json, read_text, shown
from .costs import LayerCosts, Line
from .decide import Measured

FORMAT = "megatron-ext-moe-costs/1"
_LARGEST = 1e15  # ms or bytes: beyond, sums of them overflow
LINES = ("message", "experts", "experts_backward", "to_host", "to_device")


def nothing(volume: float) -> float:
    """No time at all."""
    return 0.0


def measured(lines: dict[str, Line], kept_bytes: float) -> Measured:
    """All of the experts' work counts as fc1's, since all of it is computed again.

    Args:
        lines: by the names in the file.
        kept_bytes: see above.
    """
    message, experts, backward, out, back = (lines[name] for name in LINES)
    costs = LayerCosts(message, message, experts, nothing, out, back, backward, nothing)
    return Measured(costs, kept_bytes)


def dump(found: Measured) -> str:
    """The file's content, on one line."""
    costs = found.costs
    pieces = (costs.dispatch, costs.fc1, costs.fc1_backward, costs.to_host, costs.to_device)
    data: dict[str, Any] = {"format": FORMAT}
    for name, line in zip(LINES, pieces):
        if not isinstance(line, Line):
            raise TypeError(f"{name} is no line: {line}")
        data[name] = [line.alpha_ms, line.beta_ms, line.min_ms]
    return json.dumps({**data, "kept_bytes": found.kept_bytes})


def load(path: str) -> Measured:
    """Read a file.

    Raises:
        ValueError: it cannot be read or is not of the form above.
    """
    try:
        return parse(read_text(path))
    except OSError as error:
        raise ValueError(f"cannot read MoE costs {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"MoE costs {path}: {error}") from None


def parse(text: str) -> Measured:
    """From the file's content.

    Raises:
        ValueError: it is not of the form above.
    """
    data = parse_json(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'expected an object with "format": "{FORMAT}"')
    unknown = sorted(set(data) - {"format", "kept_bytes", *LINES})
    if unknown:
        raise ValueError(f"{shown(unknown[0])} is not known")
    lines = {name: Line(beta, alpha, least) for name in LINES
             for alpha, beta, least in [_numbers(data, name)]}  # fmt: skip
    (kept,) = _numbers({"kept_bytes": [data.get("kept_bytes")]}, "kept_bytes", 1)
    return measured(lines, kept)


def _numbers(data: dict[str, Any], name: str, count: int = 3) -> list[float]:
    values = data.get(name)
    good = isinstance(values, list) and len(values) == count
    for value in values if good and isinstance(values, list) else ():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and number and 0 <= value <= _LARGEST
    if not good:
        what = "a number" if count == 1 else "a list of three numbers"
        raise ValueError(f"{name!r} must be {what} >= 0 and <= {_LARGEST:g}, got {shown(values)}")
    return [float(value) for value in values or ()]
