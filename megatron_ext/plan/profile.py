"""A measured profile in place of analytic times and bytes.

    {"format": "megatron-ext-profile/1",
     "micro_batch_size": 1,
     "cheap_recompute": false,
     "layers": [4, 4, 4, 4],
     "stages": [[F, B, W], ...],
     "set_bytes": [...],
     "weight_set_bytes": [...],
     "hop": 0.0001,
     "to_host": 2.1e10,
     "to_device": 2.2e10}

``stages`` are seconds of one microbatch's passes, one row a stage in model order; ``set_bytes``
are the bytes that one set of each stage keeps from F to B, ``weight_set_bytes`` from B to W. All
but ``format``, ``micro_batch_size``, ``layers`` and ``stages`` may be left out: the models fill
them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..schedule.reading import parse_json, read_text, real, shown, whole
from .layout import Split
from .memory import StageBytes
from .model import PlanError
from .times import PassTimes

FORMAT = "megatron-ext-profile/1"


@dataclass(frozen=True)
class Profile:
    """What was measured, at one microbatch size; times in seconds, rates in bytes/s."""

    micro_batch_size: int
    layers: tuple[int, ...]
    stages: tuple[PassTimes, ...]
    cheap_recompute: bool = False
    set_bytes: tuple[int, ...] | None = None
    weight_set_bytes: tuple[int, ...] | None = None
    hop: float | None = None
    to_host: float | None = None
    to_device: float | None = None

    @classmethod
    def load(cls, path: str) -> Profile:
        """Read a profile file.

        Raises:
            PlanError: it cannot be read or is not of the form above.
        """
        try:
            return cls.from_json(parse_json(read_text(path)))
        except OSError as error:
            raise PlanError(f"cannot read profile {path}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"profile {path}: {what}") from None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        """From the file's content.

        Raises:
            ValueError: a number is out of range, or lists have different lengths.
            KeyError, TypeError: something is missing or of another kind.
        """
        if data["format"] != FORMAT:
            raise ValueError(f'expected "format": "{FORMAT}", found {shown(data["format"])}')
        stages = tuple(PassTimes(*(real(x, "a time") for x in row)) for row in data["stages"])
        layers = tuple(whole(x, "a number of layers") for x in data["layers"])
        sizes: dict[str, tuple[int, ...] | None] = {}
        for name in ("set_bytes", "weight_set_bytes"):
            given = data.get(name)
            sizes[name] = (
                None if given is None else tuple(whole(x, name, 0, 1 << 60) for x in given)
            )
        for what, row in (("layers", layers), *sizes.items()):
            if row is not None and len(row) != len(stages):
                raise ValueError(f"{len(row)} {what} for {len(stages)} stages")
        if not stages or min(min(row) for row in stages) <= 0 or len(stages) < 2:
            raise ValueError("needs two stages or more, and times > 0")
        rates = {
            name: None
            if data.get(name) is None
            else real(data[name], name, 1e18, positive=name != "hop")
            for name in ("hop", "to_host", "to_device")
        }
        return cls(
            whole(data["micro_batch_size"], "micro_batch_size", 1),
            layers,
            stages,
            bool(data.get("cheap_recompute", False)),
            sizes["set_bytes"],
            sizes["weight_set_bytes"],
            **rates,
        )

    def times(self, split: Split) -> list[PassTimes]:
        """Every stage's passes: as measured for the measured split, else layer by layer."""
        if split.counts == self.layers:
            return list(self.stages)
        columns = [_linear([row[i] for row in self.stages], self.layers, split) for i in range(3)]
        return [PassTimes(*(max(1e-6, x) for x in row)) for row in zip(*columns)]

    def sized(self, stages: Sequence[StageBytes], split: Split) -> list[StageBytes]:
        """``stages`` with the measured bytes of their sets in place of the models'."""
        out = list(stages)
        for name, row in (("until_b", self.set_bytes), ("until_w", self.weight_set_bytes)):
            if row is None:
                continue
            same = split.counts == self.layers
            sizes = row if same else _linear(row, self.layers, split)
            out = [
                stage._replace(sets=stage.sets._replace(**{name: max(0, round(size))}))
                for stage, size in zip(out, sizes)
            ]
        return out


def _linear(measured: Sequence[float], layers: Sequence[int], split: Split) -> list[float]:
    """So much a layer, and what the first and last stage have beside their layers."""
    inner = [x / n for x, n in zip(measured[1:-1], layers[1:-1]) if n]
    inner = inner or [x / n for x, n in zip(measured, layers) if n]
    each = median(inner) if inner else 0.0
    out = [each * n for n in split.counts]
    for end in (0, -1):
        out[end] += max(0.0, measured[end] - each * layers[end])
    return out
