"""Layer plan: chunks, restored tensors and order of one call of an MoE layer; and its bytes.

The tuner times a ``LayerPlan``, the byte formula predicts its memory, and the region executes its
``operations``: what is planned is what runs. Plain Python.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol

from .._input import shown

DEPTH = 2  # slots of a ring at least: one that computes, one that messages or copies use
_COPIES = 2  # of a chunk's rows: permuted to be sent, and sorted by expert
_MESSAGES = 4  # buffers of a chunk's rows: sent and received, to the experts and back


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
        lookahead: dispatches issued before the first combine, at most n; also for how many chunks'
            messages there is room. 2 is the paper's order; n is all dispatches first.
    """

    chunks: int = 1
    strategy: Strategy = Strategy.NONE
    lookahead: int = DEPTH

    @classmethod
    def of(cls, chunks: int = 1, strategy: str = "none", lookahead: int = DEPTH) -> LayerPlan:
        """A checked plan.

        Raises:
            ValueError: no such strategy, or a number below 1.
        """
        if chunks < 1:
            raise ValueError(f"an MoE layer has at least 1 chunk, got {chunks}")
        if lookahead < 1:
            raise ValueError(f"at least 1 dispatch goes before the first combine, got {lookahead}")
        return cls(chunks, Strategy(strategy), lookahead)

    def __str__(self) -> str:
        if self.stock:
            return "Megatron's own layer"
        chunks = f"{self.chunks} chunk{'' if self.chunks == 1 else 's'}"
        return f"{chunks}, {self.strategy.value}, lookahead {min(self.lookahead, self.chunks)}"

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does the same: one chunk, nothing restored."""
        return self.chunks == 1 and self.strategy is Strategy.NONE

    @property
    def depth(self) -> int:
        """Slots of the rings for messages and the experts' input; chunk i has slot i mod depth."""
        return max(min(self.lookahead, self.chunks), DEPTH)

    @property
    def finest(self) -> int:
        """As an ``ExecutionPolicy``: its own number of chunks."""
        return self.chunks

    @property
    def expected(self) -> int:
        """As an ``ExecutionPolicy``: its own number of chunks."""
        return self.chunks

    def plan_for(self, rows: int) -> LayerPlan:
        """As an ``ExecutionPolicy``: itself, whatever the rows are."""
        return self

    def operations(self) -> Iterator[tuple[Step, int]]:
        """Steps of a pass in the order of issue, each with the position of its chunk.

        Positions count chunks in the order of the pass: ascending in forward, descending in
        backward, as autograd has it. With lookahead 2 the collectives leave as S0 S1 R0 S2 R1 ...
        (MPipeMoE, section III-B). A chunk is collected only when the messages before it have been
        issued: compute would wait for one that left later. Weight gradients fill the time until the
        last message has arrived.
        """
        count, late = self.chunks, min(self.lookahead, self.chunks) - 1
        yield Step.FETCH, 0
        for i in range(late):
            yield Step.DISPATCH, i
        for i in range(count):
            if i + 1 < count:
                yield Step.FETCH, i + 1
            if i + late < count:
                yield Step.DISPATCH, i + late
            yield Step.COMPUTE, i
            if i + 1 == count:
                yield Step.WEIGHTS, i
            if i >= late:
                yield Step.COLLECT, i - late
        for i in range(count - late, count):
            yield Step.COLLECT, i


STOCK = LayerPlan()


class ExecutionPolicy(Protocol):
    """Gives the plan of one call, with the same arguments the same one on all ranks."""

    @property
    def finest(self) -> int:
        """The most chunks that it may give; whatever it gives divides this."""

    @property
    def expected(self) -> int:
        """The chunks that it gives unless there are more rows than ever."""

    def plan_for(self, rows: int) -> LayerPlan:
        """The plan of a call in which the busiest rank's experts have ``rows`` rows."""


def simplest_first(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """``plans`` by strategy, then chunks, then lookahead; stock's layer is the first of all."""
    order = list(Strategy)
    return sorted(plans, key=lambda plan: (order.index(plan.strategy), plan.chunks, plan.lookahead))


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
        """Of a row of fc1's output, which is part of K."""
        return min(self.inside_bytes, (2 if self.gated else 1) * self.ffn * self.element_bytes)

    def kept_inside(self, strategy: Strategy) -> float:
        """Bytes of a row inside the experts that ``strategy`` keeps on the device."""
        kept = {Restore.KEEP: self.inside_bytes, Restore.ACTIVATE: self.fc1_bytes}
        return kept.get(strategy.inside, 0)


class Footprint(NamedTuple):
    """Predicted bytes on the device at the worst moment of a step, by what they are for.

    Attributes:
        saved_bytes: of all layers and microbatches in flight, between forward and backward.
        ring_bytes: of what exists once per device, while one layer runs.
        temporary_bytes: of permuting and sorting one chunk, and of its messages.
    """

    saved_bytes: int
    ring_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of them."""
        return sum(self)

    def __str__(self) -> str:
        return (
            f"{self.saved_bytes} bytes kept for backward, {self.ring_bytes} in the buffers of the "
            f"chunks that run, {self.temporary_bytes} in its copies and messages"
        )


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


def footprint(shape: LayerShape, rows: int, calls: int, plan: LayerPlan) -> Footprint:
    """What a rank needs at the worst moment of a step, for its MoE layers alone.

    The ring is that of backward, which has all of forward's: T_DI and T_M restored, and their
    gradients and dT_DO. It is paid once per device however many layers there are.

    Args:
        rows: of the busiest rank's experts in a call.
        calls: layers on the rank times microbatches in flight; each keeps ``saved_bytes``.
    """
    chunk = -(-rows // plan.chunks)
    row = shape.hidden * shape.element_bytes
    inner_grad = (3 if shape.gated else 2) * shape.ffn * shape.element_bytes
    ring, slots = float(inner_grad), min(plan.depth, plan.chunks)
    once = plan.strategy.keeps_products
    ring += 2 * row * min(plan.lookahead, plan.chunks) if once else 3 * row * slots
    # One chunk's is computed again at a time; what is copied has two slots.
    missing = shape.inside_bytes - shape.kept_inside(plan.strategy)
    copied = plan.strategy.inside is Restore.OFFLOAD
    ring += missing * (min(DEPTH, plan.chunks) if copied else 1)
    late = once and not plan.stock  # Megatron's own layer computes them one by one
    weights = weight_gradient_bytes(shape, rows, plan) if late else (0.0, 0.0)
    return Footprint(
        calls * saved_bytes(shape, rows, plan.strategy),
        round(weights[0] + max(chunk * ring, weights[1])),
        (_COPIES + _MESSAGES * plan.depth) * chunk * row,
    )


def weight_gradient_bytes(shape: LayerShape, rows: int, plan: LayerPlan) -> tuple[float, float]:
    """Of weight gradients that are computed once for all chunks of a call.

    Returns:
        What inputs and output gradients of fc1 and fc2 take, R(2M + F + 2F) or R(2M + F + F)
        elements, more than what the call kept; and fc2's rows of all chunks joined.
    """
    e, row = shape.element_bytes, shape.hidden * shape.element_bytes
    operands = 2 * row + (3 if shape.gated else 2) * shape.ffn * e
    more = max(0.0, operands - row - shape.kept_inside(plan.strategy))
    return rows * more, rows * (row + shape.ffn * e) * (plan.chunks > 1)


class BudgetError(ValueError):
    """No plan keeps the budget.

    Attributes:
        needed_bytes: the smallest sufficient budget.
    """

    def __init__(self, text: str, needed_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


class Budget(NamedTuple):
    """What a rank's MoE layers may take on the device.

    Attributes:
        calls: gives layers on the rank times microbatches in flight, now.
    """

    nbytes: int
    shape: LayerShape
    calls: Callable[[], int]

    def footprint(self, plan: LayerPlan, rows: int) -> Footprint:
        """Of ``plan`` where the busiest rank's experts have ``rows`` rows a call."""
        return footprint(self.shape, rows, self.calls(), plan)

    def fits(self, plan: LayerPlan, rows: int) -> bool:
        """True if the prediction is within the limit."""
        return self.footprint(plan, rows).peak_bytes <= self.nbytes

    def least(self, plans: Sequence[LayerPlan], rows: int) -> LayerPlan:
        """The plan that takes least, the first of equals."""
        return min(plans, key=lambda plan: self.footprint(plan, rows).peak_bytes)

    def require(self, plans: Sequence[LayerPlan], rows: int) -> None:
        """Check that something fits.

        Raises:
            BudgetError: no plan does; it names the smallest sufficient budget and what takes it.
        """
        plan = self.least(plans, rows)
        needs = self.footprint(plan, rows)
        if needs.peak_bytes <= self.nbytes:
            return
        what = f"most of it are the buffers of one chunk: {needs}"
        cure = "more chunks, or fewer tokens"
        if needs.saved_bytes >= needs.ring_bytes + needs.temporary_bytes:
            what = f"most of it is kept for backward: {needs}"
            cure = (
                "another strategy, or have fewer microbatches in flight or MoE layers on the rank"
            )
        raise BudgetError(
            f"a budget of {self.nbytes} bytes on the device is too small for the MoE layers: the "
            f"least is {needs.peak_bytes} bytes, with {plan.chunks} chunks and "
            f"{plan.strategy.value} ({what}); raise it to that, or allow {cure}",
            needs.peak_bytes,
        )
