"""Host link: D2H and H2D transfer times, and the sharing policy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from .._input import fraction, shown
from .costs import Durations, Number, number_to_json
from .placement import Placement

POLICIES = ("single", "dual", "paired")
DEFAULT_POLICY = "single"


class LinkTimes(NamedTuple):
    """Integer times, all in units of 1/``durations.scale``.

    ``to_host[s]`` and ``to_device[s]`` are what one activation set of stage s takes.
    """

    durations: Durations
    to_host: tuple[int, ...]
    to_device: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """One rank's link is a stream of transfers; what the policy shares is one transfer at a time.

    Attributes:
        to_host, to_device: per rank, what one set takes one way, as a fraction of F+B+W of its
            chunk (PipeOffload, section 2: each is k/2 where both are equal).
        policy: ``single``, one stream a rank in both directions; ``dual``, one a direction (full
            duplex); ``paired``, one stream a rank, and ranks 2i and 2i+1, which share a switch,
            never both in the same direction (PipeOffload, appendix D). An odd last rank is alone.
    """

    to_host: tuple[Fraction, ...]
    to_device: tuple[Fraction, ...]
    policy: str = DEFAULT_POLICY

    @classmethod
    def of(
        cls,
        pp: int,
        to_host: Number | Sequence[Number],
        to_device: Number | Sequence[Number] | None = None,
        policy: str = DEFAULT_POLICY,
    ) -> Link:
        """Build from one number for all ranks or one a rank; ``to_device`` as ``to_host`` if None.

        Raises:
            ValueError: a time is not a number > 0, not one a rank, or the policy is unknown.
        """
        if policy not in POLICIES:
            raise ValueError(
                f"the transfer policy must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, "
                f"got {shown(policy)}"
            )
        d2h = _per_rank(to_host, pp)
        return cls(d2h, d2h if to_device is None else _per_rank(to_device, pp), policy)

    def times(self, placement: Placement, durations: Durations) -> LinkTimes:
        """Transfer times of every stage's sets beside its passes, everything in integers.

        Raises:
            ValueError: the link is for another number of ranks.
        """
        if not len(self.to_host) == len(self.to_device) == placement.pp:
            raise ValueError(
                f"the link has times of {len(self.to_host)} ranks but pp={placement.pp}"
            )
        scale = math.lcm(*(x.denominator for x in (*self.to_host, *self.to_device)))
        d = durations
        f, b, w = (
            tuple(x * scale for x in row)
            for row in (d.forward, d.backward_input, d.backward_weight)
        )
        whole = [sum(stage) for stage in zip(f, b, w)]
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        d2h = tuple(int(self.to_host[r] * x) for r, x in zip(ranks, whole))
        h2d = tuple(int(self.to_device[r] * x) for r, x in zip(ranks, whole))
        return LinkTimes(Durations(f, b, w, d.hop * scale, d.scale * scale), d2h, h2d)

    def uses(self, rank: int, to_host: bool) -> tuple[Hashable, ...]:
        """Resources that a transfer of ``rank`` holds while it runs.

        The first is its stream, in which transfers start in the order in which the schedule has
        them; another is shared with a neighbour, whoever is ready first.
        """
        if self.policy == "dual":
            return ((rank, to_host),)
        if self.policy == "paired":
            return ((rank,), ("pair", rank // 2, to_host))
        return ((rank,),)

    def group(self, rank: int) -> int:
        """Ranks of one group share something; their transfers are planned together."""
        return rank // 2 if self.policy == "paired" else rank

    def to_json(self) -> dict[str, Any]:
        """The ``offload`` object of a schedule file."""
        return {
            "transfer": self.policy,
            "to_host": [number_to_json(x) for x in self.to_host],
            "to_device": [number_to_json(x) for x in self.to_device],
        }

    @classmethod
    def from_json(cls, data: Any, pp: int) -> Link:
        """Reverse of ``to_json``.

        Raises:
            ValueError: a field is missing, of the wrong kind, or out of range.
        """
        if not isinstance(data, dict) or not {"transfer", "to_host", "to_device"} <= data.keys():
            raise ValueError('"offload" needs "transfer", "to_host" and "to_device"')
        for field in ("to_host", "to_device"):
            if not isinstance(data[field], list):
                raise ValueError(f'"{field}" of "offload" must be a list, one time a rank')
        return cls.of(pp, data["to_host"], data["to_device"], str(data["transfer"]))


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


def _per_rank(value: Number | Sequence[Number], pp: int) -> tuple[Fraction, ...]:
    if isinstance(value, int | float | str | Fraction):
        return (_time(value),) * pp
    times = tuple(_time(x) for x in value)
    if len(times) != pp:
        raise ValueError(f"{len(times)} transfer times for pp={pp}; give one, or one a rank")
    return times


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


_PARTS = 64
_LONGEST = 1000  # beyond, no transfer is worth its time
