"""The alphabet of a pipeline schedule: the operations of one rank.

An action is written ``F3.1``: the operation, the *stage* it belongs to, and the microbatch.
The stage is always the one that lies on the rank that runs the action:

- ``F3.1``, ``B3.1``, ``W3.1``: forward, input-gradient and weight-gradient pass; ``BW3.1`` is the
  whole backward pass.
- ``SEND_F3.1`` sends the output of ``F3.1`` to the rank of stage 4; there ``RECV_F4.1``
  receives it as the input of ``F4.1``.
- ``SEND_B3.1`` sends the input gradient computed by ``B3.1`` to the rank of stage 2; there
  ``RECV_B2.1`` receives it as the output gradient that ``B2.1`` needs.
- ``OFFLOAD3.1`` starts the copy to the host of what ``F3.1`` kept, ``RELEASE3.1`` waits for that
  copy's end and drops the device's, ``PREPARE3.1`` allocates on the device again, ``RELOAD3.1``
  starts the copy back, for whose end ``B3.1`` waits (PipeOffload, section 4). All four are points
  in the order of the rank's computation; the copies themselves run beside it.
- ``S3.1`` and others are passes of vocabulary layers that all ranks share (``vocabulary``).
- ``F3.1/2`` is of slice 2 of microbatch 1, where that has several (``units``).
- ``F3.1+B4.0`` is a joint action: a forward and a backward pass (B or BW) of the same rank that run
  as one, so that the communication inside one can hide behind the computation of the other. It
  starts when the inputs of both are there, and both results are there at its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from .._input import shown

if TYPE_CHECKING:
    from .placement import Placement


class Operation(str, Enum):
    """Base of the alphabets; a member's value is the text form's prefix.

    ``Op`` is the alphabet of every schedule. A subclass elsewhere adds operations of a feature
    (``vocabulary``); its messages are called ``SEND_...`` and ``RECV_...``,
    its collectives ``SHARE_...`` and ``JOIN_...``.

    Attributes:
        is_compute: F, B, W or BW, or a vocabulary pass: it takes compute time on the rank.
        is_copy: OFFLOAD, RELEASE, PREPARE or RELOAD.
        is_send, is_receive: a message that leaves the rank, or comes to it.
        is_collective: what all ranks take part in, each with an action of the same operation and
            microbatch.
    """

    _value_: str
    is_compute: bool
    is_copy: bool
    is_send: bool
    is_receive: bool
    is_collective: bool

    def __init__(self, text: str) -> None:
        self.is_compute = text in ("F", "B", "W", "BW", "S", "T", "E", "G")
        self.is_copy = text in ("OFFLOAD", "RELEASE", "PREPARE", "RELOAD")
        self.is_send, self.is_receive = text.startswith("SEND_"), text.startswith("RECV_")
        self.is_collective = text.startswith(("SHARE_", "JOIN_"))

    # Enum's own hash is a Python call; actions are hashed by the hundred thousand.
    __hash__ = str.__hash__

    def peer(self, action: Action, placement: Placement) -> tuple[int, Action]:
        """Of a message ``action``: the rank at its other end, and the matching action there."""
        raise NotImplementedError(self)


class Op(Operation):
    """An operation of the base alphabet."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OFFLOAD = "OFFLOAD"
    RELEASE = "RELEASE"
    PREPARE = "PREPARE"
    RELOAD = "RELOAD"

    def peer(self, action: Action, placement: Placement) -> tuple[int, Action]:
        """The neighbouring stage's end of a SEND or RECV."""
        step, matching = _OTHER_END[self]
        stage = action.stage + step
        return placement.rank_of(stage), Action(matching, stage, action.microbatch)


_OTHER_END = {
    Op.SEND_F: (1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (1, Op.SEND_B),
}
OFFLOAD_OPS = frozenset({Op.OFFLOAD, Op.RELEASE, Op.PREPARE, Op.RELOAD})

_TEXT = re.compile(r"([A-Z_]*[A-Z])(\d{1,9})\.(\d{1,9}(?:/\d{1,9})?)", re.ASCII)


class Action(NamedTuple):
    """``op`` of ``stage`` for ``microbatch``; hashable, ordered, and as small as a tuple.

    Where microbatches are cut into slices, ``microbatch`` is a unit's number (``units.Unit``).
    """

    op: Operation
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself; of a joint action its two passes."""
        return (self,)

    @property
    def is_compute(self) -> bool:
        """True for F, B, W and BW: what takes compute time on the rank."""
        return self.op.is_compute

    @property
    def is_copy(self) -> bool:
        """True for OFFLOAD, RELEASE, PREPARE and RELOAD."""
        return self.op.is_copy

    @property
    def is_message(self) -> bool:
        """True for a send or receive, of any alphabet."""
        return self.op.is_send or self.op.is_receive

    def peer(self, placement: Placement) -> tuple[int, Action]:
        """Of a message: the rank at its other end, and the matching action there."""
        return self.op.peer(self, placement)

    @classmethod
    def parse(cls, text: str, units: Mapping[str, int] | None = None) -> Action:
        """Reverse of ``str()``.

        Args:
            text: of an action.
            units: by what each prints as, where microbatches are cut into slices.

        Raises:
            ValueError: ``text`` is not of the form ``<OP><stage>.<microbatch>``, or names a unit
                that is not there.
        """
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"not an action: {shown(text)}; expected e.g. 'F3.1' (op, stage.microbatch)"
            )
        unit = _unit(match[3], text, units)
        for alphabet in Operation.__subclasses__():
            if match[1] in alphabet.__members__:
                return cls(alphabet(match[1]), int(match[2]), unit)
        known = ", ".join(op.value for alphabet in Operation.__subclasses__() for op in alphabet)
        raise ValueError(f"unknown operation {shown(match[1])} in {shown(text)}; known: {known}")


def _unit(name: str, text: str, units: Mapping[str, int] | None) -> int:
    if units is None:
        if "/" in name:
            raise ValueError(
                f"{shown(text)} names a slice, but the microbatches are not cut; "
                'give "slices", how many each has, or leave the slice out'
            )
        return int(name)
    if name not in units:
        last = list(units)[-1]
        raise ValueError(
            f"{shown(text)} names unit {name}, but units go from {next(iter(units))} to {last}; "
            "a microbatch that is cut is written with its slice, as in F3.1/2, any other without"
        )
    return units[name]


class Joint(NamedTuple):
    """A forward and a backward pass of one rank that run as one; written ``F3.1+B4.0``."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Both passes, the forward one first."""
        return (self.forward, self.backward)

    @property
    def is_compute(self) -> bool:
        """True: it takes compute time."""
        return True

    @property
    def is_copy(self) -> bool:
        """False."""
        return False

    @property
    def is_message(self) -> bool:
        """False."""
        return False


AnyAction = Action | Joint
RankActions = list[list[Action]]  # of every rank, in order; without joint actions


def parse(text: str, units: Mapping[str, int] | None = None) -> AnyAction:
    """The action or joint action of one text; ``units`` as ``Action.parse``.

    Raises:
        ValueError: it is neither; a joint action is an F and a B or BW, joined by ``+``.
    """
    if not isinstance(text, str) or "+" not in text:
        return Action.parse(text, units)
    forward, backward = (Action.parse(part, units) for part in text.split("+", 1))
    if forward.op is not Op.F or backward.op not in (Op.B, Op.BW):
        raise ValueError(
            f"not a joint action: {shown(text)}; expected an F and a B or BW, e.g. 'F3.1+B4.0'"
        )
    return Joint(forward, backward)
