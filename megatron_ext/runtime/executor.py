"""The executor: interprets one rank's list of a lowered schedule."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..schedule.actions import OFFLOAD_OPS, Action, AnyAction, Joint, Op, Operation
from ..schedule.effects import CARRIED, passes, results
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from .channel import Channel, Receipt
from .trace import Recorder
from .watchdog import Watchdog

TRACE_ENVIRONMENT = "MEGATRON_EXT_TRACE"


class ForwardPass(NamedTuple):
    """Arguments of ``StageRunner.forward``."""

    chunk: int
    microbatch: int
    x: torch.Tensor | None


class BackwardPass(NamedTuple):
    """Arguments of ``StageRunner.backward``."""

    chunk: int
    microbatch: int
    grad: torch.Tensor | None
    split: bool


class StageRunner(Protocol):
    """The model as the executor needs it: one method for each kind of compute action."""

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

    def joint(
        self, forward: ForwardPass, backward: BackwardPass
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a joint action; both inputs are there. A runner that cannot overlap the two passes
        inherits this: F, then the backward pass.

        Returns the results of ``forward`` and ``backward``."""
        return self.forward(*forward), self.backward(*backward)

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """Run OFFLOAD, RELEASE, PREPARE or RELOAD of an activation set."""

    def live_sets(self) -> float:
        """Activation sets on the device at this moment."""


class Extension(Protocol):
    """Operations of a feature, beyond the alphabet ``Op``."""

    def handlers(self, executor: Executor) -> Mapping[Operation, Callable[[Any], None]]:
        """One function an operation; of ``Op``, too, in place of the executor's own. It may use
        the executor's ``take``, ``inbox`` and ``outbox``, which must be empty again when the
        iteration ends, its ``forward`` and ``backward``."""

    def finish(self) -> None:
        """After the last action: wait until everything has been sent and received."""

    def release(self) -> None:
        """Keep neither the executor nor its runner: the iteration is over or abandoned."""


class Executor:
    """Runs one iteration of ``schedule`` on one pipeline rank.

    Args:
        schedule: lowered (with communication actions), for the number of ranks of the channel.
        rank: this rank in the pipeline group.
        channel: messages to and from the other pipeline ranks.
        watchdog: gets the present action and what it waits for.
        recorder: takes the measured times and resident sets.
        extension: runs the operations beyond ``Op``; None: there are none.

    Attributes:
        inbox: by consumer, messages that F or B (or an extension's operation) will take.
        outbox: by producer, what they have produced for other ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        runner: StageRunner,
        channel: Channel,
        watchdog: Watchdog,
        recorder: Recorder,
        extension: Extension | None = None,
    ) -> None:
        self.placement: Placement = schedule.placement
        self.microbatches = len(schedule.units)
        self.rank, self.watchdog = rank, watchdog
        self.inbox: dict[Action, torch.Tensor | Receipt] = {}
        self.outbox: dict[Action, torch.Tensor] = {}
        self._runner, self.recorder = runner, recorder
        self._channel, self._extension = channel, extension
        if channel.device.type != "cpu":
            watchdog.pending = self.pending
        self._received = _received_by_then(schedule, rank, channel.posts_late)
        handlers: dict[Operation, Callable[[Any], None]] = {
            Op.F: self.forward,
            Op.B: self.backward,
            Op.BW: self.backward,
            Op.W: self._weight,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            **dict.fromkeys(OFFLOAD_OPS, self._move),
        }
        if extension is not None:
            handlers.update(extension.handlers(self))
        self._program: tuple[Sequence[AnyAction], Mapping[Any, Callable[[Any], None]]]
        self._program = schedule.ranks[rank], handlers

    def run(self) -> None:
        """Run the iteration.

        Raises:
            RuntimeError: a message or an activation set is left over, which means that the
                schedule and the model disagree.
        """
        self._run_actions()
        self.watchdog.waiting("for its last messages to be taken", self._channel.sending_to)
        self._channel.finish()
        if self._extension is not None:
            self._extension.finish()
        self._forget()
        if self.inbox or self.outbox:
            left = ", ".join(map(str, [*self.inbox, *self.outbox]))
            raise RuntimeError(f"pipeline rank {self.rank} ended with messages left over: {left}")

    def pending(self) -> str:
        """What the device waits for while the host goes on (NCCL): its first action that has not
        ended, if actions are timed, and the first message. Callable from another thread."""
        action, message = self.recorder.unfinished(), self._channel.pending()
        found = [] if action is None else [f"the device has not ended {action}"]
        found += [] if message is None else [f"{message} has not been transferred"]
        return "; ".join(found)

    def drop(self) -> None:
        """Keep nothing of an iteration that failed: what its passes hold would wait for garbage
        collection, which may be off, or come after a trainer has tried again."""
        self.inbox.clear()
        self.outbox.clear()
        self._forget()

    def _forget(self) -> None:
        self._program = (), {}  # It refers to this object, which refers to it.
        if self._extension is not None:
            self._extension.release()

    def _run_actions(self) -> None:
        # What the loop does for every action is on the way to the device's next kernel.
        (row, handlers), joint = self._program, self._joint
        total = len(row)
        at, sending = self.watchdog.at, self._channel.sending_to
        verbose = os.environ.get(TRACE_ENVIRONMENT) == "1"
        profiled = torch.autograd._profiler_enabled
        for position, action in enumerate(row):
            # An action starts with its operation, a joint one with its forward pass.
            handler = handlers.get(action[0], joint)
            at(action, position, total, sending)
            if verbose:
                line = f"[megatron_ext] rank {self.rank} {position}/{total} {action}\n"
                sys.stderr.write(line)
            # Looking costs a hundredth of a range that nobody records.
            if profiled() and action.is_compute:
                with torch.profiler.record_function(f"PP:{action}"):
                    handler(action)
            else:
                handler(action)

    def forward(self, action: Action) -> None:
        """Run F."""
        _, stage, microbatch = action
        x = self.take(action) if stage > 0 else None
        with self.recorder.measure(action):
            y = self._runner.forward(self.placement.chunk_of(stage), microbatch, x)
        self.recorder.resident(self._runner.live_sets())
        self._end_forward(action, y)

    def _end_forward(self, action: Action, y: torch.Tensor | None) -> None:
        _, stage, microbatch = action
        if stage + 1 < self.placement.num_stages:
            self._deliver(action, Action(Op.F, stage + 1, microbatch), y)
        if action in self._received:
            self._settle(action)

    def backward(self, action: Action) -> None:
        """Run B or BW."""
        op, stage, microbatch = action
        grad = self._gradient(stage, microbatch)
        with self.recorder.measure(action):
            chunk = self.placement.chunk_of(stage)
            input_grad = self._runner.backward(chunk, microbatch, grad, op is Op.B)
        self._end_backward(action, input_grad)

    def _gradient(self, stage: int, microbatch: int) -> torch.Tensor | None:
        # Neighbours name the message by the operation B, whether or not this rank fuses W into it.
        last = stage + 1 == self.placement.num_stages
        return None if last else self.take(Action(Op.B, stage, microbatch))

    def _end_backward(self, action: Action, input_grad: torch.Tensor | None) -> None:
        _, stage, microbatch = action
        key = Action(Op.B, stage, microbatch)
        if stage > 0:
            self._deliver(key, Action(Op.B, stage - 1, microbatch), input_grad)
        if key in self._received:
            self._settle(key)

    def _joint(self, action: Joint) -> None:
        (_, stage, microbatch), (op, other, another) = action
        x = self.take(action.forward) if stage > 0 else None
        chunk_of = self.placement.chunk_of
        forward = ForwardPass(chunk_of(stage), microbatch, x)
        grad = self._gradient(other, another)
        backward = BackwardPass(chunk_of(other), another, grad, op is Op.B)
        # The set that F makes comes before the one that the backward pass frees goes.
        sets = self._runner.live_sets() + 1
        with self.recorder.measure(action):
            y, input_grad = self._runner.joint(forward, backward)
        self.recorder.resident(sets)
        self._end_forward(action.forward, y)
        self._end_backward(action.backward, input_grad)

    def _weight(self, action: Action) -> None:
        with self.recorder.measure(action):
            chunk = self.placement.chunk_of(action.stage)
            self._runner.weight(chunk, action.microbatch)

    def _move(self, action: Action) -> None:
        chunk = self.placement.chunk_of(action.stage)
        assert isinstance(action.op, Op)
        self._runner.move(action.op, chunk, action.microbatch)
        self.recorder.resident(self._runner.live_sets())

    def _deliver(self, producer: Action, consumer: Action, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            raise RuntimeError(
                f"{producer} on pipeline rank {self.rank} produced nothing for {consumer}; does "
                "the stage use its input?"
            )
        if self.placement.rank_of(consumer.stage) == self.rank:
            self.inbox[consumer] = tensor
        else:
            self.outbox[producer] = tensor

    def take(self, consumer: Action) -> torch.Tensor:
        """The message for ``consumer``, once it is there."""
        message = self.inbox.pop(consumer)
        if isinstance(message, Receipt):
            self.watchdog.waiting(f"for a message from pipeline rank {message.peer}")
            with self.recorder.wait():
                message = message.wait()
            self.watchdog.waiting("inside the model")
        return message

    def _settle(self, consumer: Action) -> None:
        """After ``consumer``: release messages for which its input proves that the peer has posted
        receives.

        Not before it, so that a transfer in flight hides behind the pass.
        """
        peer, count = self._received[consumer]
        self.watchdog.waiting(f"for pipeline rank {peer} to take a message")
        self._channel.settle(peer, count)

    def _send(self, action: Action) -> None:
        result, (peer, there) = CARRIED[action.op], action.peer(self.placement)
        tensor = self.outbox.pop(action._replace(op=result))
        self.watchdog.waiting(f"sending to pipeline rank {peer}")
        self._channel.send(tensor, peer, self._tag(result, there.stage, action.microbatch))

    def _receive(self, action: Action) -> None:
        result, (peer, _) = CARRIED[action.op], action.peer(self.placement)
        self.watchdog.waiting(f"posting a receive from pipeline rank {peer}")
        tag = self._tag(result, action.stage, action.microbatch)
        self.inbox[action._replace(op=result)] = self._channel.receive(peer, tag)

    def _tag(self, op: Operation, consumer_stage: int, microbatch: int) -> int:
        # gloo matches by tag, so a wrong order could not even deliver wrong data; NCCL matches by
        # order, which the lowered schedule guarantees.
        kind = 0 if op is Op.F else 1
        return (consumer_stage * self.microbatches + microbatch) * 2 + kind


_Received = dict[Action, tuple[int, int]]
# By identities of schedules that are alive; an executor is made for every iteration.
_RECEIVED: dict[tuple[int, int, bool], tuple[weakref.ref[Schedule], _Received]] = {}


def _received_by_then(schedule: Schedule, rank: int, late: bool) -> _Received:
    """``_find_received``, once for each schedule object and rank."""
    key = id(schedule), rank, late
    known = _RECEIVED.get(key)
    if known is None or known[0]() is not schedule:
        # The identity may be another schedule's later on.
        forget = weakref.ref(schedule, lambda _: _RECEIVED.pop(key, None))
        known = _RECEIVED[key] = forget, _find_received(schedule, rank, late)
    return known[1]


def _find_received(schedule: Schedule, rank: int, late: bool) -> _Received:
    """For every F or B of ``rank`` with an input from a peer: (the peer, how many messages from
    ``rank`` it had posted receives for before it sent that input).

    Receives from one rank are posted in the order in which the messages are sent, so a count says
    which.

    Args:
        late: a receive is posted where the schedule has it or later, at the latest before the pass
            that needs the message, and those before it at the latest then.
    """
    received: _Received = {}
    for peer, row in enumerate(schedule.ranks):
        if peer == rank:
            continue
        count = posted = 0
        number: dict[Action, int] = {}  # by the F or B that needs the message
        for action in passes(row):
            result = CARRIED.get(action.op)
            if result is None:
                if late:
                    needs = action._replace(op=results(action.op)[0])
                    posted = max(posted, number.get(needs, 0))
                continue
            other, matching = action.peer(schedule.placement)
            if other == rank and action.op.is_send:
                received[matching._replace(op=result)] = peer, posted
            elif other == rank:
                count += 1
                number[action._replace(op=result)] = count
                posted = posted if late else count
    return received
