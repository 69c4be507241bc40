"""The alphabet of a pipeline schedule: what one rank can be told to do.

An action is written ``F3.1``: the operation, the *stage* it belongs to, and the microbatch.
The stage is always the one that lives on the rank executing the action:

- ``SEND_F3.1`` sends the output of ``F3.1`` to the rank of stage 4; there ``RECV_F4.1``
  receives it as the input of ``F4.1``.
- ``SEND_B3.1`` sends the input gradient computed by ``B3.1`` to the rank of stage 2; there
  ``RECV_B2.1`` receives it as the output gradient that ``B2.1`` needs.
- ``PREFIX2.0``, ``STEP2.0`` and ``VALIDATE2.0`` (optimizer post-validation, see ``lower``)
  belong to a rank and the step before this iteration; they name its first stage and microbatch 0.
  ``PREFIX`` adds the rank's part to the gradient statistics of the ranks before it
  (``RECV_PREFIX``), which ``SEND_PREFIX`` hands to the next rank; ``STEP`` updates the parameters
  by what is known so far; ``VALIDATE`` compares that with the statistics of all ranks, which come
  back from the last rank (``RECV_STATE``, ``SEND_STATE``).
- ``OFFLOAD3.1`` starts the copy to the host of what ``F3.1`` kept, ``RELEASE3.1`` waits for that
  copy's end and drops the device's, ``PREPARE3.1`` allocates on the device again, ``RELOAD3.1``
  starts the copy back, for whose end ``B3.1`` waits (PipeOffload, section 4). All four are points
  in the order of the rank's computation; the copies themselves run beside it.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from .._input import shown


class Op(str, Enum):
    """One operation; its value is the text form's prefix."""

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
    PREFIX = "PREFIX"
    STEP = "STEP"
    VALIDATE = "VALIDATE"
    SEND_PREFIX = "SEND_PREFIX"
    RECV_PREFIX = "RECV_PREFIX"
    SEND_STATE = "SEND_STATE"
    RECV_STATE = "RECV_STATE"

    # Enum's own hash is a Python call; actions are hashed by the hundred thousand.
    __hash__ = str.__hash__


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.W, Op.BW})
# What one rank does for post-validation, and its messages.
VALIDATION_OPS = frozenset({Op.PREFIX, Op.STEP, Op.VALIDATE})
VALIDATION_MESSAGES = frozenset({Op.SEND_PREFIX, Op.RECV_PREFIX, Op.SEND_STATE, Op.RECV_STATE})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_PREFIX, Op.SEND_STATE})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_PREFIX, Op.RECV_STATE})
COMMUNICATION_OPS = SEND_OPS | RECV_OPS
OFFLOAD_OPS = frozenset({Op.OFFLOAD, Op.RELEASE, Op.PREPARE, Op.RELOAD})
# Everything that post-validation adds to a schedule.
ALL_VALIDATION_OPS = VALIDATION_OPS | VALIDATION_MESSAGES
# What an action does to the number of activation sets on the device.
DEVICE_STEPS = {Op.F: 1, Op.W: -1, Op.BW: -1, Op.RELEASE: -1, Op.PREPARE: 1}

_TEXT = re.compile(r"([A-Z_]*[A-Z])(\d{1,9})\.(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """``op`` of ``stage`` for ``microbatch``; hashable, ordered, and as small as a tuple."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """True for F, B, W and BW: what takes compute time on the rank."""
        return self.op in COMPUTE_OPS

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reverse of ``str()``.

        Raises:
            ValueError: ``text`` is not of the form ``<OP><stage>.<microbatch>``.
        """
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"not an action: {shown(text)}; expected e.g. 'F3.1' (op, stage.microbatch)"
            )
        try:
            op = Op(match[1])
        except ValueError:
            known = ", ".join(o.value for o in Op)
            raise ValueError(
                f"unknown operation {shown(match[1])} in {shown(text)}; known: {known}"
            ) from None
        return cls(op, int(match[2]), int(match[3]))


Orders = list[list[Action]]  # of every rank
