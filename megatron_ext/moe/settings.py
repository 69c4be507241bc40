"""How a rank's MoE layers run now: number of chunks, strategy, order of the all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .strategies import Strategy


class Trial(Protocol):
    """Wants to know of one call of a layer."""

    weighs: bool

    def weighed(self, nbytes: int, rows: int) -> None:
        """Where ``weighs``, after forward: so many bytes stay on the device for backward, for so
        many rows of this rank's experts."""

    def timed(self, watch: Watch) -> None:
        """Forward and backward are issued; ``watch`` will know how long they take."""


class Watch(Protocol):
    """Time between pairs of points of a device's work."""

    def microseconds(self) -> int | None:
        """The sum; None while the device has not come so far. Never waits."""


class Way(NamedTuple):
    """How one call of a layer runs, the same on all ranks of its groups.

    Attributes:
        chunks: n >= 1.
        strategy: what is kept for backward.
        ahead: dispatches issued before the first combine, cut to n; also for how many chunks'
            messages there is room. 2 is the paper's; n is all dispatches first.
        trial: who wants to know.
    """

    chunks: int = 1
    strategy: Strategy = Strategy.NONE
    ahead: int = 2
    trial: Trial | None = None


class Decides(Protocol):
    """Chooses the way of each call of one layer, with the same arguments on all its ranks."""

    @property
    def finest(self) -> int:
        """The most chunks that it may choose; whatever it chooses divides it."""

    def outgoing(self) -> Sequence[int]:
        """Small integers, always as many, that go to all ranks with the counts of rows."""

    def decide(self, rows: int, notes: Sequence[Sequence[int]], saves: bool) -> Way:
        """The way of the call whose rows were counted.

        Args:
            rows: the most that any rank's experts have in this call.
            notes: every rank's ``outgoing``.
            saves: whether a backward pass may follow.
        """


class Settings:
    """One way for all calls until it is changed. It must be the same on all ranks of a layer's
    groups.

    Args:
        chunks, strategy, ahead: see ``Way``; the strategy or its name.

    Attributes:
        way: for the calls to come.

    Raises:
        ValueError: no such strategy, or a number below 1.
    """

    def __init__(
        self, chunks: int = 1, strategy: Strategy | str = Strategy.NONE, ahead: int = 2
    ) -> None:
        self.set(chunks, strategy, ahead)

    def set(self, chunks: int, strategy: Strategy | str, ahead: int = 2) -> None:
        """Change it, between two steps.

        Raises:
            ValueError: no such strategy, or a number below 1.
        """
        if chunks < 1:
            raise ValueError(f"an MoE layer has at least 1 chunk, got {chunks}")
        if ahead < 1:
            raise ValueError(f"at least 1 dispatch goes before the first combine, got {ahead}")
        self.way = Way(chunks, Strategy(strategy), ahead)

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does the same: one chunk, nothing restored."""
        return self.way.chunks == 1 and self.way.strategy is Strategy.NONE

    @property
    def restores(self) -> bool:
        """True where something is not kept for backward."""
        return self.way.strategy is not Strategy.NONE

    def built(self, layer: object) -> None:
        """Nothing depends on how many layers there are."""

    def of(self, *call: object) -> Settings:
        """What decides for a call: the same for all."""
        return self

    def close(self) -> None:
        """Nothing to give back."""

    @property
    def finest(self) -> int:
        """See ``Decides``."""
        return self.way.chunks

    def outgoing(self) -> Sequence[int]:
        """See ``Decides``."""
        return ()

    def decide(self, rows: int, notes: Sequence[Sequence[int]], saves: bool) -> Way:
        """See ``Decides``."""
        return self.way
