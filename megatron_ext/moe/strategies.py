"""What a chunk of an MoE layer keeps for its backward pass, and how the rest comes back.

Two things are needed there: the experts' *input* (the rows that this rank received, with their
probabilities; the paper's T_DI), and what lies *inside* the experts (T_M). Each strategy says for
both how they are had again (MPipeMoE, table I). Both the runtime and the simulator read this table.
"""

from __future__ import annotations

import enum
from typing import NoReturn


class Restore(enum.Enum):
    """How something that the backward pass needs gets there."""

    KEEP = "kept on the device"
    OFFLOAD = "copied to the host, and back"
    RESEND = "sent again by the ranks that have the tokens"
    RECOMPUTE = "computed again from the experts' input"


class Strategy(str, enum.Enum):
    """A memory-reuse strategy, by the name that ``--moe-memory-reuse`` has for it.

    Raises:
        ValueError: there is none of that name.
    """

    NONE = "none"
    S1 = "s1"
    S2 = "s2"
    S3 = "s3"
    S4 = "s4"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(one.value for one in cls)
        raise ValueError(f"the strategy must be one of {names}, got {value!r}")

    @property
    def input(self) -> Restore:
        """How the experts' input is restored."""
        return _TABLE[self][0]

    @property
    def inside(self) -> Restore:
        """How what the experts computed in between is restored."""
        return _TABLE[self][1]

    @property
    def copies(self) -> bool:
        """True if anything goes to the host."""
        return Restore.OFFLOAD in _TABLE[self]

    @property
    def keeps_graph(self) -> bool:
        """True if the forward pass leaves an autograd graph of the experts behind."""
        return self.inside is not Restore.RECOMPUTE


_TABLE = {
    Strategy.NONE: (Restore.KEEP, Restore.KEEP),
    Strategy.S1: (Restore.OFFLOAD, Restore.OFFLOAD),
    Strategy.S2: (Restore.RESEND, Restore.OFFLOAD),
    Strategy.S3: (Restore.OFFLOAD, Restore.RECOMPUTE),
    Strategy.S4: (Restore.RESEND, Restore.RECOMPUTE),
}
