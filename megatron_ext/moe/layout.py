"""A model of one chunked MoE layer: which operation is in which stream, in which order and slot.

The selector simulates it. The runtime (``region.py``) does not read it: of the layout that was
chosen it takes the chunks, the strategy and the lookahead (``settings.Way``), and issues its
operations with code of its own. Where the two differ, predictions are off; results are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .costs import BACKWARD, DIRECTIONS, FORWARD, Kind
from .strategies import Restore, Strategy

ALTERNATE, DISPATCH_FIRST = "alternate", "dispatch-first"
ORDERS = (ALTERNATE, DISPATCH_FIRST)


class Stream(Enum):
    """One of a device's in-order queues."""

    COMM = "comm"
    COMP = "comp"
    COPY = "copy"


class Buffer(Enum):
    """A tensor that exists once per chunk."""

    INPUT = "T_DI"
    MIDDLE = "T_M"
    OUTPUT = "T_DO"
    INPUT_GRAD = "dT_DI"
    MIDDLE_GRAD = "dT_M"
    OUTPUT_GRAD = "dT_DO"


class Access(NamedTuple):
    """What an operation does: its stream, and what it reads and writes of its own chunk."""

    stream: Stream
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


_COMM, _COMP, _COPY = Stream.COMM, Stream.COMP, Stream.COPY
_B = Buffer
ACCESS: dict[Kind, Access] = {
    Kind.DISPATCH: Access(_COMM, (), (_B.INPUT,)),
    Kind.FC1: Access(_COMP, (_B.INPUT,), (_B.MIDDLE,)),
    Kind.FC2: Access(_COMP, (_B.MIDDLE,), (_B.OUTPUT,)),
    Kind.COMBINE: Access(_COMM, (_B.OUTPUT,), ()),
    Kind.SAVE_INPUT: Access(_COPY, (_B.INPUT,), ()),
    Kind.SAVE_MIDDLE: Access(_COPY, (_B.MIDDLE,), ()),
    Kind.GRAD_DISPATCH: Access(_COMM, (), (_B.OUTPUT_GRAD,)),
    Kind.FC2_BACKWARD: Access(_COMP, (_B.OUTPUT_GRAD, _B.MIDDLE), (_B.MIDDLE_GRAD,)),
    Kind.FC1_BACKWARD: Access(_COMP, (_B.MIDDLE_GRAD, _B.INPUT), (_B.INPUT_GRAD,)),
    Kind.GRAD_COMBINE: Access(_COMM, (_B.INPUT_GRAD,), ()),
    Kind.REDISPATCH: Access(_COMM, (), (_B.INPUT,)),
    Kind.BOTH_DISPATCH: Access(_COMM, (), (_B.OUTPUT_GRAD, _B.INPUT)),
    Kind.REPEAT_FC1: Access(_COMP, (_B.INPUT,), (_B.MIDDLE,)),
    Kind.LOAD_INPUT: Access(_COPY, (), (_B.INPUT,)),
    Kind.LOAD_MIDDLE: Access(_COPY, (), (_B.MIDDLE,)),
}


class Op(NamedTuple):
    """One operation of one chunk."""

    kind: Kind
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value}.{self.chunk}"


@dataclass(frozen=True)
class Ring:
    """Slots a tensor has while memory is reused; chunk i lies in slot i mod depth; None: as chunks.

    Attributes:
        input: of T_DI and its gradient; the paper's 2.
        middle: of T_M; the paper's 1. Its gradient always has one.
        output: of T_DO and its gradient; the paper's 2.
    """

    input: int | None = 2
    middle: int | None = 1
    output: int | None = 2

    def __post_init__(self) -> None:
        for name in ("input", "middle", "output"):
            depth = getattr(self, name)
            if depth is not None and depth < 1:
                raise ValueError(f"a ring has at least one slot, got {name}={depth}")


@dataclass(frozen=True)
class Layout:
    """One layer in one of its directions.

    Attributes:
        chunks: n, parts of the rows of every (source, expert) slot.
        strategy: how T_DI and T_M are restored; with ``none`` they stay, and nothing is a ring.
        order: of the all-to-alls: ``alternate`` is S0, .., S[k-1], R0, Sk, R1, .. for a lookahead
            of k; ``dispatch-first`` is all S, then all R.
        lookahead: 2 is the paper's; more than twice the slots of T_DI and T_DO may get stuck.
        ring: slots, see ``slots``.
        packed: what backward dispatches again (s2, s4) travels with the gradients: one latency
            less, but neither is there before both are.
    """

    chunks: int = 1
    strategy: str = "none"
    order: str = ALTERNATE
    lookahead: int = 2
    ring: Ring = Ring()
    packed: bool = False

    def __post_init__(self) -> None:
        Strategy(self.strategy)
        if self.chunks < 1:
            raise ValueError(f"a layer has at least one chunk, got {self.chunks}")
        if self.order not in ORDERS:
            raise ValueError(f"the order must be {' or '.join(ORDERS)}, got {self.order!r}")
        if self.lookahead < 1:
            raise ValueError(f"the lookahead must be at least 1, got {self.lookahead}")

    @property
    def restore(self) -> Strategy:
        """How T_DI and T_M come back."""
        return Strategy(self.strategy)

    @property
    def ahead(self) -> int:
        """Dispatches issued before the first combine."""
        return self.chunks if self.order == DISPATCH_FIRST else min(self.lookahead, self.chunks)

    def slots(self, buffer: Buffer) -> int:
        """How many chunks of ``buffer`` there is room for; ``chunks`` where it is no ring."""
        if self.strategy == "none":
            return self.chunks
        depth = {
            Buffer.INPUT: self.ring.input,
            Buffer.INPUT_GRAD: self.ring.input,
            Buffer.MIDDLE: self.ring.middle,
            Buffer.MIDDLE_GRAD: 1,
            Buffer.OUTPUT: self.ring.output,
            Buffer.OUTPUT_GRAD: self.ring.output,
        }[buffer]
        return self.chunks if depth is None else min(depth, self.chunks)

    def sequence(self, direction: str) -> list[int]:
        """The chunks in the order in which a direction takes them.

        Backward's is descending, as autograd's is: what forward finished last is at hand first.

        Raises:
            ValueError: neither ``forward`` nor ``backward``.
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"the direction must be {' or '.join(DIRECTIONS)}, got {direction!r}")
        chunks = list(range(self.chunks))
        return chunks[::-1] if direction == BACKWARD else chunks

    def streams(self, direction: str) -> dict[Stream, list[Op]]:
        """Every stream's operations in the order in which they are issued.

        What T_M is restored from comes first, T_M is needed before T_DI. So a dispatch that is
        repeated goes before the gradients' if fc1 runs again (s4), and after it if not (s2).
        """
        out, comp, copy, back = _kinds(self.restore, direction, self.packed)
        chunks = self.sequence(direction)
        comm: list[Op] = []
        for place in range(self.chunks + self.ahead - 1):
            if place < self.chunks:
                comm += (Op(kind, chunks[place]) for kind in out)
            if place >= self.ahead - 1:
                comm.append(Op(back, chunks[place - self.ahead + 1]))
        return {
            Stream.COMM: comm,
            Stream.COMP: [Op(kind, chunk) for chunk in chunks for kind in comp],
            Stream.COPY: [Op(kind, chunk) for chunk in chunks for kind in copy],
        }


def _kinds(
    how: Strategy, direction: str, packed: bool
) -> tuple[tuple[Kind, ...], tuple[Kind, ...], tuple[Kind, ...], Kind]:
    """Per chunk: dispatches, computation and copies, each in order; and the combine."""
    input_copied = how.input is Restore.OFFLOAD
    middle_copied = how.inside is Restore.OFFLOAD
    if direction == FORWARD:
        saves = (Kind.SAVE_INPUT,) * input_copied + (Kind.SAVE_MIDDLE,) * middle_copied
        return (Kind.DISPATCH,), (Kind.FC1, Kind.FC2), saves, Kind.COMBINE
    out: tuple[Kind, ...] = (Kind.GRAD_DISPATCH,)
    comp: tuple[Kind, ...] = (Kind.FC2_BACKWARD, Kind.FC1_BACKWARD)
    if how.input is Restore.RESEND:
        again = (Kind.REDISPATCH,)
        out = again + out if how.inside is Restore.RECOMPUTE else out + again
        out = (Kind.BOTH_DISPATCH,) if packed else out
    if how.inside is Restore.RECOMPUTE:
        comp = (Kind.REPEAT_FC1, *comp)
    loads = (Kind.LOAD_MIDDLE,) * middle_copied + (Kind.LOAD_INPUT,) * input_copied
    return out, comp, loads, Kind.GRAD_COMBINE
