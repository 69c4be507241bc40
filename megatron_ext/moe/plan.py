"""Layer plan: chunks, restored tensors and order of one call of an MoE layer; and what it keeps.

Training tries a ``LayerPlan``, the planner predicts its time and memory, and the region executes
its ``operations``: what is planned is what runs. Plain Python.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from .._input import shown

DEPTH = 2  # slots of a ring: one that computes, one that messages or copies use


class Restore(enum.Enum):
    """How something that the backward pass needs gets there."""

    KEEP = "kept on the device"
    OFFLOAD = "copied to the host, and back"
    RESEND = "sent again by the ranks that have the tokens"
    RECOMPUTE = "computed again from the experts' input"
    ACTIVATE = "computed again from fc1's output, which is kept"


class Strategy(str, enum.Enum):
    """A memory-reuse strategy, by the name that ``--moe-memory-reuse`` has for it.

    Backward needs the experts' *input* (the rows that this rank received, with their
    probabilities; the paper's T_DI) and the tensors *inside* the experts (T_M). A strategy defines
    how each is restored (MPipeMoE, table I; ``s0`` is not the paper's: it drops what the activation
    function computed). In this order they need more of the link to the host.

    Raises:
        ValueError: there is none of that name.
    """

    NONE = "none"
    S0 = "s0"
    S4 = "s4"
    S3 = "s3"
    S2 = "s2"
    S1 = "s1"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(sorted(one.value for one in cls))
        raise ValueError(f"the strategy must be one of {names}, got {shown(value)}")

    @property
    def input(self) -> Restore:
        """How the experts' input is restored."""
        return _TABLE[self][0]

    @property
    def inside(self) -> Restore:
        """How what the experts computed in between is restored."""
        return _TABLE[self][1]

    @property
    def recomputes(self) -> bool:
        """True if the backward pass computes something again."""
        return self.inside in (Restore.RECOMPUTE, Restore.ACTIVATE)

    @property
    def copies(self) -> bool:
        """True if something goes to the host."""
        return Restore.OFFLOAD in (self.input, self.inside)

    @property
    def keeps_products(self) -> bool:
        """True if what fc1 needs and makes is kept: all chunks' weight gradients may then wait for
        the last chunk's input gradient, or for a W pass."""
        return self.input is Restore.KEEP


_TABLE = {
    Strategy.NONE: (Restore.KEEP, Restore.KEEP),
    Strategy.S0: (Restore.KEEP, Restore.ACTIVATE),
    Strategy.S1: (Restore.OFFLOAD, Restore.OFFLOAD),
    Strategy.S2: (Restore.RESEND, Restore.OFFLOAD),
    Strategy.S3: (Restore.OFFLOAD, Restore.RECOMPUTE),
    Strategy.S4: (Restore.RESEND, Restore.RECOMPUTE),
}


class Step(enum.Enum):
    """What a pass does with one chunk. Backward's steps are the adjoints of forward's."""

    FETCH = "fetch"  # start copying back what is on the host; nothing where nothing is there
    DISPATCH = "dispatch"  # S: start sending rows to the experts
    COMPUTE = "compute"  # C: the experts, and R: start sending their rows back
    WEIGHTS = "weights"  # in backward, weight gradients of all chunks, where their rows are kept
    COLLECT = "collect"  # wait for those, and add them up


class LayerPlan(NamedTuple):
    """How one call of a layer runs, the same on all ranks of its groups.

    Attributes:
        chunks: n >= 1.
        strategy: what is kept for backward.
    """

    chunks: int = 1
    strategy: Strategy = Strategy.NONE

    @classmethod
    def of(cls, chunks: int = 1, strategy: str = "none") -> LayerPlan:
        """A checked plan.

        Raises:
            ValueError: no such strategy, or a number below 1.
        """
        if chunks < 1:
            raise ValueError(f"an MoE layer has at least 1 chunk, got {chunks}")
        return cls(chunks, Strategy(strategy))

    def __str__(self) -> str:
        if self.stock:
            return "Megatron's own layer"
        return f"{self.chunks} chunk{'' if self.chunks == 1 else 's'}, {self.strategy.value}"

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does the same: one chunk, nothing restored."""
        return self.chunks == 1 and self.strategy is Strategy.NONE

    def operations(self) -> Iterator[tuple[Step, int]]:
        """Steps of a pass in the order of issue, each with the position of its chunk.

        Positions count chunks in the order of the pass: ascending in forward, descending in
        backward, as autograd has it. The collectives leave as S0 S1 R0 S2 R1 ... (MPipeMoE, section
        III-B). A chunk is collected only when the messages before it have been issued: compute
        would wait for one that left later. Weight gradients fill the time until the last message
        has arrived.
        """
        last = self.chunks - 1
        yield Step.FETCH, 0
        yield Step.DISPATCH, 0
        for i in range(self.chunks):
            if i < last:
                yield Step.FETCH, i + 1
                yield Step.DISPATCH, i + 1
            yield Step.COMPUTE, i
            if i == last:
                yield Step.WEIGHTS, i
            if i:
                yield Step.COLLECT, i - 1
        yield Step.COLLECT, last


STOCK = LayerPlan()
AUTO = "auto"


def candidates(chunks: str = AUTO, strategy: str = AUTO) -> Sequence[LayerPlan]:
    """The plans that training tries, Megatron's own layer first; each keeps less than the last.

    Args:
        chunks, strategy: as ``--moe-pipeline-chunks`` and ``--moe-memory-reuse`` have them; what is
            not ``auto`` is the same in all plans.

    Raises:
        ValueError: a number of chunks that is none, or an unknown strategy.
    """
    strategies = [Strategy.NONE, Strategy.S0, Strategy.S3, Strategy.S4]
    if strategy != AUTO:
        strategies = [Strategy(strategy)]
    if chunks != AUTO:
        return [LayerPlan.of(int(chunks), one) for one in strategies]
    first, *others = strategies
    return [LayerPlan(n, first) for n in (1, 2, 4)] + [LayerPlan(4, one) for one in others]


class LayerShape(NamedTuple):
    """Sizes of one MoE layer on one rank.

    Attributes:
        hidden: elements of a row that travels, M.
        ffn: an expert's FFN width on this rank, F; without the gate's share.
        gated: fc1 is twice as wide, and half of it gates the other half.
        element_bytes: 2 for bf16.
        kept_bytes: that the experts keep inside for a row, K; 0: as megatron-core's unfused
            experts do (by unique storage, measured): 6F elements if gated (SwiGLU), 3F if not.
    """

    hidden: int
    ffn: int
    gated: bool = True
    element_bytes: int = 2
    kept_bytes: float = 0

    @property
    def inside_bytes(self) -> float:
        """K."""
        return self.kept_bytes or (6 if self.gated else 3) * self.ffn * self.element_bytes

    @property
    def fc1_bytes(self) -> float:
        """Bytes of a row of fc1's output, which is part of K."""
        return min(self.inside_bytes, (2 if self.gated else 1) * self.ffn * self.element_bytes)

    def kept_inside(self, strategy: Strategy) -> float:
        """Bytes of a row inside the experts that ``strategy`` keeps on the device."""
        kept = {Restore.KEEP: self.inside_bytes, Restore.ACTIVATE: self.fc1_bytes}
        return kept.get(strategy.inside, 0)


def saved_bytes(shape: LayerShape, rows: int, strategy: Strategy) -> int:
    """What one layer call keeps on the device: R(e + Me + K) with ``none``.

    Of these ``s0`` keeps R(e + Me) and fc1's output, the others R e. e is for the probabilities.
    megatron-core's exchanges and sorts save nothing but indices, which are not counted; nor is the
    layer's own input, which others keep.
    """
    per_row = float(shape.element_bytes)
    per_row += shape.hidden * shape.element_bytes * (strategy.input is Restore.KEEP)
    return round(rows * (per_row + shape.kept_inside(strategy)))


def copied_bytes(shape: LayerShape, rows: int, strategy: Strategy) -> float:
    """What one layer call copies to the host in forward, and back in backward (table I's Q)."""
    per_row = shape.hidden * shape.element_bytes * (strategy.input is Restore.OFFLOAD)
    return rows * (per_row + shape.inside_bytes * (strategy.inside is Restore.OFFLOAD))
