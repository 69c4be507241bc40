"""How much streams of one device hold each other up."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum


class Stream(Enum):
    """One of a device's in-order queues."""

    COMM = "comm"
    COMP = "comp"
    COPY = "copy"


@dataclass(frozen=True)
class Slowdown:
    """Speed left to a stream while others are busy (MPipeMoE, section II-C; MPMoE's alpha(y, x)).

    Attributes:
        pairs: (stream, busy other) -> share of its own speed, in (0, 1]; 1 where missing.
        among_all: stream -> share while both others are busy; where missing, both pairs multiplied.
    """

    pairs: Mapping[tuple[Stream, Stream], float]
    among_all: Mapping[Stream, float]

    def __post_init__(self) -> None:
        for which, share in [*self.pairs.items(), *self.among_all.items()]:
            if not 0 < share <= 1:
                raise ValueError(f"the speed left to {which} must be in (0, 1], got {share}")

    def speed(self, stream: Stream, busy: Set[Stream]) -> float:
        """The share of its speed that ``stream`` has while the streams ``busy`` are."""
        others = busy - {stream}
        if len(others) > 1 and stream in self.among_all:
            return self.among_all[stream]
        speed = 1.0
        for other in sorted(others, key=lambda one: one.value):
            speed *= self.pairs.get((stream, other), 1.0)
        return speed
