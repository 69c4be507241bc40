"""A measured profile in place of analytic times and bytes; ``--pp-profile`` writes and reads it.

    {"format": "megatron-ext-profile/1",
     "micro_batch_size": 1,
     "cheap_recompute": false,
     "layers": [4, 4, 4, 4],
     "stages": [[F, B, W], ...],
     "set_bytes": [...],
     "weight_set_bytes": [...],
     "hop": 0.0001,
     "to_host": 2.1e10,
     "to_device": 2.2e10,
     "model": {"hidden_size": 4096, "seq_length": 8192, ...},
     "settings": {"recomputation": "full uniform 1", "quantization": "none"}}

``stages`` are seconds of one microbatch's passes, one row a stage in model order; ``set_bytes``
are the bytes that one set of each stage keeps from F to B, ``weight_set_bytes`` from B to W;
``hop`` is seconds from a pass's end to its message's arrival, ``to_host`` and ``to_device`` are
bytes/s; ``model`` is what the profile was measured on, by Megatron's argument names, and
``settings`` in words. All but ``format``, ``micro_batch_size``, ``layers`` and ``stages`` may be
left out: the models fill them in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from .._input import flag_of, parse_json, read_text, real, shown, whole
from ..schedule.costs import Costs
from ..schedule.link import Link
from ..schedule.placement import Placement
from .layout import Split
from .memory import StageBytes
from .model import PlanError
from .times import PassTimes, costs_in_parts

FORMAT = "megatron-ext-profile/1"
# What makes times and bytes others, by the name that Megatron's arguments and Job have for it.
MODEL = (
    *("hidden_size", "seq_length", "tensor_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size",),
)
SETTINGS = ("recomputation", "quantization")  # beside them, in words


class Measurable(Protocol):
    """A job, or Megatron's arguments, as far as a profile is compared with them; they have the
    names in ``Profile.model`` too."""

    @property
    def micro_batch_size(self) -> int: ...
    @property
    def num_layers(self) -> int | None: ...
    @property
    def cheap_recompute(self) -> bool: ...
    @property
    def recipe(self) -> str | None: ...


def settings(one: Any, recipe: str | None, cheap: bool) -> dict[str, str]:
    """What makes times and bytes others beside sizes, in words.

    Args:
        one: a job, Megatron's arguments, or a model's configuration.
        recipe: of FP8 or FP4; None: 16 or 32 bits.
        cheap: with ``--pp-cheap-recompute``, whose modules do not count.
    """
    granularity = getattr(one, "recompute_granularity", None)
    modules = set(one.recompute_modules or ()) if granularity == "selective" else set()
    text = ", ".join(sorted(modules - ({"layernorm", "moe_act"} if cheap else set())))
    if granularity == "full":
        text = f"full {one.recompute_method} {one.recompute_num_layers or 1}"
    return dict(zip(SETTINGS, (text or "none", recipe or "none")))


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
    model: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    path: str = field(default="", compare=False)  # where it was read from

    @classmethod
    def load(cls, path: str) -> Profile:
        """Read a profile file.

        Raises:
            PlanError: it cannot be read or is not of the form above.
        """
        try:
            return replace(cls.from_json(parse_json(read_text(path))), path=path)
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
        model = {name: whole(value, name, 1) for name, value in data.get("model", {}).items()}
        if not model.keys() <= set(MODEL):
            raise ValueError(
                f'"model" may have {", ".join(MODEL)}, found {shown(", ".join(model))}'
            )
        words = data.get("settings", {})
        known = isinstance(words, dict) and words.keys() <= set(SETTINGS)
        if not (known and all(isinstance(text, str) for text in words.values())):
            raise ValueError(
                f'"settings" may have {", ".join(SETTINGS)}, each with words, found '
                f"{shown(str(words))}; measure again with --pp-profile-steps"
            )
        return cls(
            whole(data["micro_batch_size"], "micro_batch_size", 1),
            layers,
            stages,
            bool(data.get("cheap_recompute", False)),
            sizes["set_bytes"],
            sizes["weight_set_bytes"],
            path="",
            **rates,
            model=model,
            settings=words,
        )

    def to_json(self) -> dict[str, Any]:
        """The file's content; what is not known is left out."""
        data = {
            "format": FORMAT,
            "micro_batch_size": self.micro_batch_size,
            "cheap_recompute": self.cheap_recompute,
            "layers": list(self.layers),
            "stages": [list(row) for row in self.stages],
            "set_bytes": self.set_bytes,
            "weight_set_bytes": self.weight_set_bytes,
            "hop": self.hop,
            "to_host": self.to_host,
            "to_device": self.to_device,
            "model": self.model or None,
            "settings": self.settings or None,
        }
        return {name: value for name, value in data.items() if value is not None}

    def save(self, path: str) -> None:
        """Write the file, at once or not at all: no reader sees a part.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        part.replace(target)

    def require(self, job: Measurable) -> None:
        """Refuse a job that this was not measured on.

        Raises:
            PlanError: the microbatch, the recompute setting, the layers or the model differ.
        """
        pairs = [(name, measured, getattr(job, name)) for name, measured in self.model.items()]
        pairs += [("micro_batch_size", self.micro_batch_size, job.micro_batch_size)]
        pairs += [("num_layers", sum(self.layers), job.num_layers)]
        for name, measured, own in pairs:
            if measured != own:
                raise PlanError(
                    f"the profile was measured with {flag_of(name)} {measured}, but the "
                    f"job has {own}; measure again with --pp-profile-steps"
                )
        for name, here in settings(job, job.recipe, job.cheap_recompute).items():
            there = self.settings.get(name, here)
            if there != here:
                raise PlanError(
                    f"the profile was measured with {name} {shown(there)}, but the job has {here}; "
                    "measure again with --pp-profile-steps"
                )
        if self.cheap_recompute != job.cheap_recompute:
            there, here = ("with", "without") if self.cheap_recompute else ("without", "with")
            raise PlanError(
                f"the profile was measured {there} --pp-cheap-recompute, but the job is {here}; "
                "measure again with --pp-profile-steps"
            )

    def costs(self, split: Split) -> Costs:
        """Of the stages of ``split``, in 64ths of the mean pass; a hop that is not known is 0."""
        return costs_in_parts(self.times(split), self.hop or 0.0)

    def link(self, split: Split, placement: Placement) -> Link | None:
        """What a set of each stage takes to the host and back; None if bytes or rates were not
        measured."""
        if self.set_bytes is None or self.to_host is None or self.to_device is None:
            return None
        seconds = [sum(row) for row in self.times(split)]
        sizes = self.of_split(self.set_bytes, split)
        return Link.measured(placement, sizes, seconds, (self.to_host, self.to_device))

    def times(self, split: Split) -> list[PassTimes]:
        """Every stage's passes: as measured for the measured split, else layer by layer."""
        if split.counts == self.layers:
            return list(self.stages)
        columns = [_linear([row[i] for row in self.stages], self.layers, split) for i in range(3)]
        return [PassTimes(*(max(1e-6, x) for x in row)) for row in zip(*columns)]

    def sized(self, stages: Sequence[StageBytes], split: Split) -> list[StageBytes]:
        """``stages`` with the measured bytes of their sets in place of the models'."""
        out = list(stages)
        for name, row in (
            ("bytes_f_to_b", self.set_bytes),
            ("bytes_b_to_w", self.weight_set_bytes),
        ):
            if row is None:
                continue
            out = [
                stage._replace(sets=stage.sets._replace(**{name: size}))
                for stage, size in zip(out, self.of_split(row, split))
            ]
        return out

    def of_split(self, row: Sequence[int], split: Split) -> list[int]:
        """Bytes of every stage: as measured for the measured split, else layer by layer."""
        if split.counts == self.layers:
            return list(row)
        return [max(0, round(size)) for size in _linear(row, self.layers, split)]


def _linear(measured: Sequence[float], layers: Sequence[int], split: Split) -> list[float]:
    """So much a layer, and what the first and last stage have beside their layers."""
    inner = [x / n for x, n in zip(measured[1:-1], layers[1:-1]) if n]
    inner = inner or [x / n for x, n in zip(measured, layers) if n]
    each = median(inner) if inner else 0.0
    out = [each * n for n in split.counts]
    for end in (0, -1):
        out[end] += max(0.0, measured[end] - each * layers[end])
    return out
