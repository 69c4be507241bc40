"""Cost file: what ``auto`` found in one run, for another (``--moe-pipeline-costs``).

    {"format": "megatron-ext-moe-costs/2", "layers": "MoE layers of hidden size ...",
     "times": [[4096, 1, "none", 2, 0.0031], [4096, 4, "none", 2, 0.0024], ...]}

A time is that of a call's forward and backward pass: [tokens of the largest call of its
bucket, chunks, strategy, lookahead, milliseconds a token]. One chunk and none is Megatron's own
layer. Former releases wrote ``kept_bytes``, ``to_host``, ``to_device`` and ``experts``, too; these
are not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .._input import parse_json, read_text, real, shown, whole
from .plan import LayerPlan

FORMAT = "megatron-ext-moe-costs/2"
_FIELDS = ("format", "layers", "kept_bytes", "times", "to_host", "to_device", "experts")

Times = dict[int, dict[LayerPlan, float]]  # by bucket's largest tokens: milliseconds a token


@dataclass(frozen=True)
class Costs:
    """What is known of layers of one kind; see the module.

    Attributes:
        layers: which; "" means all.
        times: trials; empty where there were none.
    """

    layers: str = ""
    times: Times = field(default_factory=dict)

    def dump(self) -> str:
        """The file's content, on one line."""
        times = [
            [tokens, plan.chunks, plan.strategy.value, plan.lookahead, time]
            for tokens, found in sorted(self.times.items())
            for plan, time in found.items()
            if time < float("inf")  # of a trial that no clock was read in
        ]
        return json.dumps({"format": FORMAT, **vars(self), "times": times})


def load(path: str) -> Costs:
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


def parse(text: str) -> Costs:
    """From the file's content.

    Raises:
        ValueError: it is not of the form above.
    """
    data = parse_json(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'expected an object with "format": "{FORMAT}"')
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise ValueError(f"{shown(unknown[0])} is not known")
    layers, rows = data.get("layers"), data.get("times")
    if not isinstance(layers, str) or not isinstance(rows, list):
        raise ValueError("'layers' must be a text and 'times' a list")
    times: Times = {}
    for row in rows:
        tokens, plan, time = _time(row)
        times.setdefault(tokens, {})[plan] = time
    return Costs(layers, times)


def _time(row: Any) -> tuple[int, LayerPlan, float]:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[2], str):
        raise ValueError(f"a time is [tokens, chunks, strategy, lookahead, ms], got {shown(row)}")
    tokens, chunks, strategy, lookahead, time = row
    plan = LayerPlan.of(whole(chunks, "chunks", 1), strategy, whole(lookahead, "lookahead", 1))
    return whole(tokens, "tokens"), plan, real(time, "a time", positive=True)
