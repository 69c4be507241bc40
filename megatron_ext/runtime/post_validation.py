"""Optimizer post-validation on one rank: the executor's handlers of its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from ..schedule.actions import Action, Operation
from ..schedule.post_validation import ValidationOp
from .channel import Channel
from .executor import Executor


class StepValidator(Protocol):
    """The optimizer's step before this iteration, as the schedule's operations need it."""

    channel: Channel

    def statistics(self) -> None:
        """Before PREFIX: this stage's part of them, which waits for the stage's ranks only."""

    def prefix(self, before: torch.Tensor | None) -> torch.Tensor:
        """Run PREFIX: gradient statistics of this rank and those ``before`` it (None: the first
        rank); shape and dtype are the channel's."""

    def step(self) -> None:
        """Run STEP, as far as that is right by the statistics so far."""

    def validate(self, state: torch.Tensor | None) -> torch.Tensor:
        """Run VALIDATE with all ranks' statistics (None on the last rank, which has them); the
        result goes to the rank before."""


class StepOperations:
    """Handlers of the operations of ``ValidationOp``; see ``executor.Extension``.

    Args:
        validator: of the step before the iteration.
    """

    def __init__(self, validator: StepValidator) -> None:
        self._validator = validator
        self.channel = validator.channel

    def handlers(self, executor: Executor) -> Mapping[Operation, Callable[[Action], None]]:
        self._executor = executor
        return {
            ValidationOp.PREFIX: self._prefix,
            ValidationOp.STEP: lambda _: self._validator.step(),
            ValidationOp.VALIDATE: self._validate,
            ValidationOp.SEND_PREFIX: lambda a: self._send(a, ValidationOp.PREFIX),
            ValidationOp.RECV_PREFIX: lambda a: self._receive(a, ValidationOp.PREFIX),
            ValidationOp.SEND_STATE: lambda a: self._send(a, ValidationOp.VALIDATE),
            ValidationOp.RECV_STATE: lambda a: self._receive(a, ValidationOp.VALIDATE),
        }

    def finish(self) -> None:
        self.channel.finish()

    def release(self) -> None:
        """Forget the executor, which refers to this object; see ``executor.Extension``."""
        vars(self).pop("_executor", None)

    def _prefix(self, action: Action) -> None:
        executor = self._executor
        executor.watchdog.waiting("for gradient statistics of its stage")
        self._validator.statistics()
        before = executor.take(action) if action in executor.inbox else None
        result = self._validator.prefix(before)
        if executor.rank < executor.placement.pp - 1:
            executor.outbox[action] = result

    def _validate(self, action: Action) -> None:
        executor = self._executor
        state = executor.take(action) if action in executor.inbox else None
        result = self._validator.validate(state)
        if executor.rank:
            executor.outbox[action] = result

    def _send(self, action: Action, op: ValidationOp) -> None:
        executor, (peer, _) = self._executor, action.peer(self._executor.placement)
        tensor = executor.outbox.pop(action._replace(op=op))
        executor.watchdog.waiting(f"sending to pipeline rank {peer}")
        self.channel.send(tensor, peer, self._tag(op, peer))

    def _receive(self, action: Action, op: ValidationOp) -> None:
        executor, (peer, _) = self._executor, action.peer(self._executor.placement)
        executor.watchdog.waiting(f"posting a receive from pipeline rank {peer}")
        receipt = self.channel.receive(peer, self._tag(op, executor.rank))
        executor.inbox[action._replace(op=op)] = receipt

    def _tag(self, op: ValidationOp, receiver: int) -> int:
        behind_passes = self._executor.placement.num_stages * self._executor.microbatches * 2
        return behind_passes + 2 * receiver + (op is ValidationOp.VALIDATE)
