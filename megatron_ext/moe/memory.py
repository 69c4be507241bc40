"""Bytes that MoE layers keep between forward and backward, and while one of them runs."""

from __future__ import annotations

from dataclasses import dataclass

from .costs import BACKWARD, DIRECTIONS, FORWARD, LayerShape
from .layout import Buffer, Layout
from .strategies import Restore, Strategy

COPIES = 2  # of the rows: permuted to be sent, and sorted by expert


@dataclass(frozen=True)
class Load:
    """What one rank has to keep.

    Attributes:
        rows: that it receives in one layer call; the most over ranks, as arenas must fit anywhere.
        layers: MoE layers on the rank, all of one shape.
        in_flight: microbatches whose forward has run and whose backward has not.
        copies: of one chunk's rows that the runtime has besides the tensors that are named: to
            permute and sort.
        messages: buffers of one chunk's rows, besides those, that it has for each chunk under way:
            where it sends from and receives in memory of its own, 4.
    """

    rows: int
    layers: int = 1
    in_flight: int = 1
    copies: int = COPIES
    messages: int = 0

    def __post_init__(self) -> None:
        least = min(self.rows, self.copies, self.messages)
        if least < 0 or self.layers < 1 or self.in_flight < 1:
            raise ValueError(f"no rank has a load of {self}")


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes on the device at the worst moment, by what they are for.

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
        """On the device."""
        return self.saved_bytes + self.ring_bytes + self.temporary_bytes

    def __str__(self) -> str:
        return (
            f"{self.saved_bytes} bytes kept for backward, {self.ring_bytes} in the buffers of the "
            f"chunks that run, {self.temporary_bytes} in its copies and messages"
        )


def saved_bytes(shape: LayerShape, rows: int, strategy: str) -> int:
    """What one layer call keeps on the device: R * (1 + M + kappa*F) * e with ``none``.

    megatron-core's exchanges and sorts save nothing but indices, so T_I, T_DO and T_O are not among
    it. A strategy that reuses memory leaves the probabilities, R * e; what the layer's own input
    takes is alive anyway, and indices are not counted.
    """
    how, keep = Strategy(strategy), Restore.KEEP
    elements = 1.0
    elements += shape.hidden * (how.input is keep) + shape.middle * (how.inside is keep)
    return round(rows * elements * shape.element_bytes)


def ring_bytes(shape: LayerShape, rows: int, layout: Layout, direction: str) -> int:
    """Buffers that exist once per device and direction, for the largest chunk.

    Forward: T_DI, T_M and T_DO; backward: T_DI and T_M restored, and dT_DO, dT_M and dT_DI. What
    ``none`` keeps is not among them; it has as many others as the order of the all-to-alls lets
    live.
    """
    sizes = {
        FORWARD: {
            Buffer.INPUT: float(shape.hidden),
            Buffer.MIDDLE: shape.middle,
            Buffer.OUTPUT: float(shape.hidden),
        },
        BACKWARD: {
            Buffer.INPUT: float(shape.hidden),
            Buffer.MIDDLE: shape.middle,
            Buffer.OUTPUT_GRAD: float(shape.hidden),
            Buffer.MIDDLE_GRAD: shape.middle_grad,
            Buffer.INPUT_GRAD: float(shape.hidden),
        },
    }[direction]
    elements = sum(size * _live(layout, buffer) for buffer, size in sizes.items())
    return round(largest_chunk(rows, layout.chunks) * elements * shape.element_bytes)


def _live(layout: Layout, buffer: Buffer) -> int:
    if layout.strategy != "none":
        return layout.slots(buffer)
    if buffer in (Buffer.INPUT, Buffer.MIDDLE):
        return 0  # among what is saved
    return 1 if buffer is Buffer.MIDDLE_GRAD else layout.ahead


def temporary_bytes(shape: LayerShape, rows: int, chunks: int, copies: int = COPIES) -> int:
    """So many copies of one chunk's rows."""
    return copies * largest_chunk(rows, chunks) * shape.hidden * shape.element_bytes


def largest_chunk(rows: int, chunks: int) -> int:
    """Rows of the largest of ``chunks`` parts of ``rows``."""
    return -(-rows // chunks)


def footprint(shape: LayerShape, load: Load, layout: Layout) -> Footprint:
    """What a rank needs at the worst moment of a step, for its MoE layers alone.

    Rings are paid once per device however many layers there are, as one arena serves all; what is
    saved is paid by every layer and microbatch in flight.
    """
    calls = load.layers * load.in_flight
    copies = load.copies + load.messages * max(2, layout.ahead)
    return Footprint(
        calls * saved_bytes(shape, load.rows, layout.strategy),
        max(ring_bytes(shape, load.rows, layout, direction) for direction in DIRECTIONS),
        temporary_bytes(shape, load.rows, layout.chunks, copies),
    )
