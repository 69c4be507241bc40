"""Interprets one rank's list of a lowered schedule. What was simulated is what runs here."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ..schedule.actions import OFFLOAD_OPS, Action, Op
from ..schedule.schedule import Schedule
from ..schedule.validation import head_length, without_validation
from .channel import Channel, Receipt
from .trace import Recorder
from .watchdog import Watchdog

TRACE_ENVIRONMENT = "MEGATRON_EXT_TRACE"


class StageRunner(Protocol):
    """What the executor asks of a model: one method for each kind of compute action."""

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run F; ``x`` is the stage's input (None on the first stage).

        Returns the activation for the next stage, free of autograd history (None on the last)."""

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        """Run B (``split``) or BW; ``grad`` belongs to F's result (None on the last stage).

        Returns the gradient of F's input (None on the first stage)."""

    def weight(self, chunk: int, microbatch: int) -> None:
        """Run W."""

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """Run OFFLOAD, RELEASE, PREPARE or RELOAD of an activation set."""

    def live_sets(self) -> int:
        """Activation sets on the device at this moment."""


class StepValidator(Protocol):
    """What the executor asks of the optimizer under post-validation: the step before."""

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


class Executor:
    """Runs one iteration of ``schedule`` on one pipeline rank.

    Args:
        schedule: lowered (with communication actions), for the number of ranks of the channel.
        rank: this rank in the pipeline group.
        runner: the model.
        channel: messages to and from the other pipeline ranks.
        watchdog: is told what is being waited for.
        recorder: takes the measured times and resident sets.
        validator: of the step before this iteration; None: the optimizer has stepped as usual, and
            the schedule's post-validation is left out, on all ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        runner: StageRunner,
        channel: Channel,
        watchdog: Watchdog,
        recorder: Recorder,
        validator: StepValidator | None = None,
    ) -> None:
        self._placement = schedule.placement
        self._microbatches = schedule.microbatches
        self._actions = schedule.ranks[rank]
        self._validator, self._next = validator, 0
        self._head = head_length(self._actions) if validator is not None else 0
        if validator is None and schedule.is_validated:
            self._actions = without_validation(self._actions)
        self._rank = rank
        self._runner, self._channel = runner, channel
        self._watchdog, self._recorder = watchdog, recorder
        # What F or B of (stage, microbatch) will consume, and what they produced for others.
        self._inbox: dict[Action, torch.Tensor | Receipt] = {}
        self._outbox: dict[Action, torch.Tensor] = {}
        self._taken = {} if channel.polls else _taken_by_then(schedule, rank)
        self._verbose = os.environ.get(TRACE_ENVIRONMENT) == "1"
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.BW: self._backward,
            Op.W: self._weight,
            Op.SEND_F: lambda a: self._send(a, Op.F, a.stage + 1),
            Op.SEND_B: lambda a: self._send(a, Op.B, a.stage - 1),
            Op.RECV_F: lambda a: self._receive(a, Op.F, a.stage - 1),
            Op.RECV_B: lambda a: self._receive(a, Op.B, a.stage + 1),
            **dict.fromkeys(OFFLOAD_OPS, self._move),
            Op.PREFIX: self._prefix,
            Op.STEP: lambda _: self._steps().step(),
            Op.VALIDATE: self._validate,
            Op.SEND_PREFIX: lambda a: self._send_validation(a, Op.PREFIX, 1),
            Op.RECV_PREFIX: lambda a: self._receive_validation(a, Op.PREFIX, -1),
            Op.SEND_STATE: lambda a: self._send_validation(a, Op.VALIDATE, -1),
            Op.RECV_STATE: lambda a: self._receive_validation(a, Op.VALIDATE, 1),
        }

    def run(self) -> None:
        """The iteration, or what is left of it after ``run_head``.

        Raises:
            RuntimeError: a message or an activation set is left over, which means that the
                schedule and the model disagree.
        """
        self._run_until(len(self._actions))
        self._finish_messages()
        if self._inbox or self._outbox:
            left = ", ".join(map(str, [*self._inbox, *self._outbox]))
            raise RuntimeError(f"pipeline rank {self._rank} ended with messages left over: {left}")

    def run_head(self) -> None:
        """The step before the iteration, and of the iteration what comes before its validation.

        Nothing that concerns another rank is left to be done then, so ``run`` may come later, or
        ``drop`` in its place.
        """
        self._run_until(self._head)

    def drop(self) -> None:
        """Forget an iteration of which only the head has run, on all ranks."""
        for message in self._inbox.values():
            if isinstance(message, Receipt):
                message.wait()
        self._inbox.clear()
        self._finish_messages()

    def _finish_messages(self) -> None:
        self._watchdog.waiting("for its last messages to be taken", self._channel.sending_to)
        self._channel.finish()
        if self._validator is not None:
            self._validator.channel.finish()

    def _run_until(self, end: int) -> None:
        # What the loop does for every action is on the way to the device's next kernel.
        total, handlers = len(self._actions), self._handlers
        at, sending = self._watchdog.at, self._channel.sending_to
        profiled = torch.autograd._profiler_enabled
        for position in range(self._next, end):
            action = self._actions[position]
            at(action, position, total, sending)
            if self._verbose:
                line = f"[megatron_ext] rank {self._rank} {position}/{total} {action}\n"
                sys.stderr.write(line)
            # Looking costs a hundredth of a range that nobody records.
            if profiled() and action.is_compute:
                with torch.profiler.record_function(f"PP:{action}"):
                    handlers[action.op](action)
            else:
                handlers[action.op](action)
        self._next = end

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        x = self._take(action) if stage > 0 else None
        with self._recorder.measure(action):
            y = self._runner.forward(self._placement.chunk_of(stage), microbatch, x)
        self._recorder.resident(self._runner.live_sets())
        if stage + 1 < self._placement.num_stages:
            self._deliver(action, Action(Op.F, stage + 1, microbatch), y)
        self._let_go(action)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        # Neighbours name the message by the operation B, whether or not this rank fuses W into it.
        key = Action(Op.B, stage, microbatch)
        grad = self._take(key) if stage + 1 < self._placement.num_stages else None
        with self._recorder.measure(action):
            split = action.op is Op.B
            chunk = self._placement.chunk_of(stage)
            input_grad = self._runner.backward(chunk, microbatch, grad, split)
        if stage > 0:
            self._deliver(key, Action(Op.B, stage - 1, microbatch), input_grad)
        self._let_go(key)

    def _weight(self, action: Action) -> None:
        with self._recorder.measure(action):
            chunk = self._placement.chunk_of(action.stage)
            self._runner.weight(chunk, action.microbatch)

    def _move(self, action: Action) -> None:
        chunk = self._placement.chunk_of(action.stage)
        self._runner.move(action.op, chunk, action.microbatch)
        self._recorder.resident(self._runner.live_sets())

    def _deliver(self, producer: Action, consumer: Action, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            raise RuntimeError(
                f"{producer} on pipeline rank {self._rank} produced nothing for {consumer}; does "
                "the stage use its input?"
            )
        if self._placement.rank_of(consumer.stage) == self._rank:
            self._inbox[consumer] = tensor
        else:
            self._outbox[producer] = tensor

    def _take(self, consumer: Action) -> torch.Tensor:
        message = self._inbox.pop(consumer)
        if isinstance(message, Receipt):
            self._watchdog.waiting(f"for a message from pipeline rank {message.peer}")
            with self._recorder.wait():
                message = message.wait()
            self._watchdog.waiting("inside the model")
        return message

    def _let_go(self, consumer: Action) -> None:
        """After ``consumer``: messages that its input proves to be received can be dropped.

        Not before it, so that a transfer still under way hides behind the pass.
        """
        if consumer in self._taken:
            peer, count = self._taken[consumer]
            self._watchdog.waiting(f"for pipeline rank {peer} to take a message")
            self._channel.taken(peer, count)

    def _send(self, action: Action, op: Op, to_stage: int) -> None:
        tensor = self._outbox.pop(Action(op, action.stage, action.microbatch))
        peer = self._placement.rank_of(to_stage)
        self._watchdog.waiting(f"sending to pipeline rank {peer}")
        self._channel.send(tensor, peer, self._tag(op, to_stage, action.microbatch))

    def _receive(self, action: Action, op: Op, from_stage: int) -> None:
        peer = self._placement.rank_of(from_stage)
        tag = self._tag(op, action.stage, action.microbatch)
        self._watchdog.waiting(f"posting a receive from pipeline rank {peer}")
        receipt = self._channel.receive(peer, tag)
        self._inbox[Action(op, action.stage, action.microbatch)] = receipt

    def _steps(self) -> StepValidator:
        assert self._validator is not None
        return self._validator

    def _prefix(self, action: Action) -> None:
        self._watchdog.waiting("for gradient statistics of its stage")
        self._steps().statistics()
        before = self._take(action) if action in self._inbox else None
        self._outbox[action] = self._steps().prefix(before)
        if self._rank == self._placement.pp - 1:
            del self._outbox[action]

    def _validate(self, action: Action) -> None:
        state = self._take(action) if action in self._inbox else None
        self._outbox[action] = self._steps().validate(state)
        if self._rank == 0:
            del self._outbox[action]

    def _send_validation(self, action: Action, op: Op, step: int) -> None:
        tensor = self._outbox.pop(action._replace(op=op))
        peer = self._rank + step
        self._watchdog.waiting(f"sending to pipeline rank {peer}")
        self._steps().channel.send(tensor, peer, self._validation_tag(op, peer))

    def _receive_validation(self, action: Action, op: Op, step: int) -> None:
        peer = self._rank + step
        self._watchdog.waiting(f"posting a receive from pipeline rank {peer}")
        receipt = self._steps().channel.receive(peer, self._validation_tag(op, self._rank))
        self._inbox[action._replace(op=op)] = receipt

    def _validation_tag(self, op: Op, receiver: int) -> int:
        behind_passes = self._placement.num_stages * self._microbatches * 2
        return behind_passes + 2 * receiver + (op is Op.VALIDATE)

    def _tag(self, op: Op, consumer_stage: int, microbatch: int) -> int:
        # gloo matches by tag, so a wrong order could not even deliver wrong data; NCCL matches by
        # order, which the lowered schedule guarantees.
        kind = 0 if op is Op.F else 1
        return (consumer_stage * self._microbatches + microbatch) * 2 + kind


# By identities of schedules that are alive; an executor is made for every iteration.
_TAKEN: dict[tuple[int, int], tuple[weakref.ref[Schedule], dict[Action, tuple[int, int]]]] = {}


def _taken_by_then(schedule: Schedule, rank: int) -> dict[Action, tuple[int, int]]:
    """``_find_taken``, once for each schedule object and rank."""
    key = id(schedule), rank
    known = _TAKEN.get(key)
    if known is None or known[0]() is not schedule:
        # The identity may be another schedule's later on.
        forget = weakref.ref(schedule, lambda _: _TAKEN.pop(key, None))
        known = _TAKEN[key] = forget, _find_taken(schedule, rank)
    return known[1]


def _find_taken(schedule: Schedule, rank: int) -> dict[Action, tuple[int, int]]:
    """For every F or B of ``rank`` with an input from a peer: (the peer, how many messages from
    ``rank`` it had posted receives for before it sent that input).

    Messages between two ranks are received in the order in which they are sent, so a count says
    which.
    """
    rank_of = schedule.placement.rank_of
    taken: dict[Action, tuple[int, int]] = {}
    for peer, row in enumerate(schedule.ranks):
        count = 0
        for op, stage, microbatch in row if peer != rank else ():
            if op is Op.RECV_F or op is Op.RECV_B:
                count += rank_of(stage - 1 if op is Op.RECV_F else stage + 1) == rank
            elif op is Op.SEND_F or op is Op.SEND_B:
                forward = op is Op.SEND_F
                consumer = stage + 1 if forward else stage - 1
                if rank_of(consumer) == rank:
                    key = Action(Op.F if forward else Op.B, consumer, microbatch)
                    taken[key] = peer, count
    return taken
