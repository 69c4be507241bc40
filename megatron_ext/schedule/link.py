"""Host link: D2H and H2D transfer times."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

from .._input import fraction, shown
from .costs import Durations, Number, number_to_json
from .placement import Placement


class LinkTimes(NamedTuple):
    """Integer times, all in units of 1/``durations.scale``.

    ``to_host[s]`` and ``to_device[s]`` are what one activation set of stage s takes.
    """

    durations: Durations
    to_host: tuple[int, ...]
    to_device: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """One rank's link is full duplex: a stream of transfers for each direction.

    Attributes:
        to_host, to_device: one a rank or one a stage, what one set takes one way, as a fraction of
            F+B+W of its chunk (PipeOffload, section 2: each is k/2 where both are equal). The last
            stage's sets hold the logits beside its layers, so they take another fraction.
    """

    to_host: tuple[Fraction, ...]
    to_device: tuple[Fraction, ...]

    @classmethod
    def of(
        cls,
        pp: int,
        to_host: Number | Sequence[Number],
        to_device: Number | Sequence[Number] | None = None,
    ) -> Link:
        """Build from one number for all, one a rank or one a stage (model order).

        Args:
            pp: pipeline ranks.
            to_host: numbers, or text with ``:`` between them, and ``TxN`` for N equal ones.
            to_device: likewise; as ``to_host`` if None.

        Raises:
            ValueError: a time is not a number > 0, or not one a rank or stage.
        """
        d2h = _times(to_host, pp)
        h2d = d2h if to_device is None else _times(to_device, pp)
        return cls(d2h, h2d)

    @classmethod
    def parse(
        cls,
        pp: int,
        text: str,
    ) -> Link:
        """Reverse of ``text``: ``T`` or ``T,T2``.

        Raises:
            ValueError: as ``of``, or there are more than two parts.
        """
        parts = text.split(",")
        if len(parts) > 2:
            raise ValueError(
                f"a transfer time must be T or T,T2 (there, and back), got {shown(text)}"
            )
        return cls.of(pp, parts[0], parts[-1])

    @classmethod
    def measured(
        cls,
        placement: Placement,
        sizes: Sequence[float],
        seconds: Sequence[float],
        rates: tuple[float, float],
    ) -> Link:
        """From measured or computed quantities of every stage.

        Args:
            placement: of the stages.
            sizes: bytes of a set that are copied.
            seconds: of F+B+W of one microbatch.
            rates: to the host and back, bytes/s.
        """
        d2h, h2d = (
            [travel_time(size, rate, time) for size, time in zip(sizes, seconds)] for rate in rates
        )
        return cls.of_stages(placement, d2h, h2d)

    @classmethod
    def of_stages(
        cls,
        placement: Placement,
        to_host: Sequence[Fraction],
        to_device: Sequence[Fraction],
    ) -> Link:
        """From one time a stage; one a rank is kept where the stages of every rank are equal."""
        there, back = to_host, to_device
        if all(
            len({way[s] for s in own}) == 1 for way in (there, back) for own in placement.stages
        ):
            there, back = ([way[own[0]] for own in placement.stages] for way in (there, back))
        return cls.of(placement.pp, there, back)

    def check(self, placement: Placement) -> None:
        """Refuse a placement that the times are not for.

        Raises:
            ValueError: there are neither as many as ranks nor as many as stages.
        """
        for times in (self.to_host, self.to_device):
            if len(times) not in (placement.pp, placement.num_stages):
                raise ValueError(
                    f"the link has {len(times)} transfer times a way, but there are "
                    f"{placement.pp} ranks with {placement.chunks} "
                    f"{'chunk' if placement.chunks == 1 else 'chunks'} each; give one time, one a "
                    f"rank, or one a stage ({placement.num_stages})"
                )

    def of_stage(self, placement: Placement, stage: int) -> tuple[Fraction, Fraction]:
        """The times of one stage's sets, to the host and back."""
        rank = placement.rank_of(stage)
        there, back = (
            times[rank if len(times) == placement.pp else stage]
            for times in (self.to_host, self.to_device)
        )
        return there, back

    def times(self, placement: Placement, durations: Durations) -> LinkTimes:
        """Transfer times of every stage's sets beside its passes, everything in integers.

        Raises:
            ValueError: the link is for another number of ranks or stages.
        """
        self.check(placement)
        scale = math.lcm(*(x.denominator for x in {*self.to_host, *self.to_device}))
        d = durations.times(scale, durations.scale * scale)
        f, b, w = d[:3]
        stages = range(placement.num_stages)
        ways = zip(*(self.of_stage(placement, stage) for stage in stages))
        d2h, h2d = (
            tuple(int(part * (f[s] + b[s] + w[s])) for s, part in zip(stages, way)) for way in ways
        )
        return LinkTimes(d, d2h, h2d)

    @property
    def text(self) -> str:
        """The times as ``--offload-time`` takes them, exactly."""
        ways = [_text(self.to_host), _text(self.to_device)]
        return ",".join(ways if ways[0] != ways[1] else ways[:1])

    def to_json(self) -> dict[str, Any]:
        """The ``offload`` object of a schedule file."""
        return {
            "to_host": [number_to_json(x) for x in self.to_host],
            "to_device": [number_to_json(x) for x in self.to_device],
        }

    @classmethod
    def from_json(cls, data: Any, placement: Placement) -> Link:
        """Reverse of ``to_json``.

        Raises:
            ValueError: a field is missing, of the wrong kind, or out of range.
        """
        if not isinstance(data, dict) or not {"to_host", "to_device"} <= data.keys():
            raise ValueError('"offload" needs "to_host" and "to_device"')
        for field in ("to_host", "to_device"):
            if not isinstance(data[field], list):
                raise ValueError(
                    f'"{field}" of "offload" must be a list, one time a rank or one a stage'
                )
        link = cls.of(placement.pp, data["to_host"], data["to_device"])
        link.check(placement)
        return link


def travel_time(size_bytes: float, rate: float, seconds: float) -> Fraction:
    """One way of a set as a fraction of its chunk's passes: in 64ths, rounded up, 1000 at most.

    A plan needs small integers, and noise in the last digits should not make another plan.

    Args:
        size_bytes: of the set.
        rate: of the link, bytes/s.
        seconds: of the chunk's F+B+W.
    """
    part = size_bytes / rate / max(seconds, 1e-9)
    return min(Fraction(max(1, math.ceil(part * _PARTS)), _PARTS), Fraction(_LONGEST))


def _times(value: Number | Sequence[Number], pp: int) -> tuple[Fraction, ...]:
    """Every rank's or stage's time."""
    if isinstance(value, str):
        value = [time for part in value.split(":") for time in _repeated(part)]
        value = value * pp if len(value) == 1 else value
    elif isinstance(value, int | float | Fraction):
        value = [value] * pp
    times = tuple(_time(x) for x in value)
    if not times or len(times) % pp:
        raise ValueError(
            f"{len(times)} transfer times for pp={pp}; give one, one a rank, or one a stage"
        )
    return times


def _repeated(part: str) -> list[str]:
    """``TxN`` as N times T."""
    match = _REPEATED.fullmatch(part.strip())
    return [part] if match is None else [match[1]] * int(match[2])


def _text(times: Sequence[Fraction]) -> str:
    runs = [(_exact(time), len(list(run))) for time, run in groupby(times)]
    if len(runs) == 1:
        return runs[0][0]
    return ":".join(f"{time}x{count}" if count > 1 else time for time, count in runs)


def _exact(time: Fraction) -> str:
    decimal = str(number_to_json(time))
    return decimal if fraction(decimal) == time else str(time)


def _time(value: Number) -> Fraction:
    try:
        time = fraction(value)
    except ValueError:
        time = Fraction(0)
    if not 0 < time <= _LONGEST:
        raise ValueError(
            "an offload time must be a number > 0 (and <= 1000), the fraction of a chunk's F+B+W "
            f"that one activation set travels one way, got {shown(value)}"
        )
    return time


_REPEATED = re.compile(r"(.+)x([1-9][0-9]{0,4})", re.ASCII)
_PARTS = 64
_LONGEST = 1000  # beyond, no transfer is worth its time
