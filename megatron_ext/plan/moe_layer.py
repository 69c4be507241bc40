"""Timeline of one MoE layer call: its operations on the device's streams, forward and backward.

The operations, their order and what they wait for are those that ``moe/passes.py`` issues for a
``LayerPlan``; streams are compute, the network (one NCCL stream for both directions) and a copy
stream each way. An operation starts when the one before it on its stream and all that it waits for
have ended, as with CUDA streams and events. MPipeMoE (arXiv 2506.22175), sections III-B to III-E.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..moe.plan import (
    DEPTH,
    LayerPlan,
    Restore,
    Step,
    Strategy,
)


class Stream(enum.Enum):
    """What executes its operations one after the other, in the order of issue."""

    COMPUTE = "compute"
    NETWORK = "network"
    TO_HOST = "to host"
    TO_DEVICE = "to device"


class Kind(enum.Enum):
    """An operation of one chunk. Backward's operations are the adjoints of forward's."""

    SPLIT = "index of all chunks' rows"
    PACK = "rows packed to be sent"
    SEND = "all-to-all to the experts"
    SORT = "rows sorted by expert"
    EXPERTS = "the experts"
    WEIGHTS = "weight gradients of all chunks"
    RETURN = "all-to-all from the experts"
    ADD = "sum of each token's rows"
    SAVE = "copy to the host"
    LOAD = "copy from the host"

    @property
    def letter(self) -> str:
        """One letter for pictures; S, C and R are the papers'."""
        return _LETTERS[self]


_LETTERS = {
    Kind.SPLIT: "I",
    Kind.PACK: "P",
    Kind.SEND: "S",
    Kind.SORT: "O",
    Kind.EXPERTS: "C",
    Kind.WEIGHTS: "W",
    Kind.RETURN: "R",
    Kind.ADD: "A",
    Kind.SAVE: "D",
    Kind.LOAD: "H",
}


class Operation(NamedTuple):
    """One operation as it is issued.

    Attributes:
        kind, chunk: what it does, for which chunk.
        stream: where it runs.
        time: that it takes, in the unit of the costs.
        after: numbers of earlier operations that it waits for, besides the one before it on its
            stream.
    """

    kind: Kind
    chunk: int
    stream: Stream
    time: float
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        whole = self.kind in (Kind.SPLIT, Kind.WEIGHTS)
        return self.kind.letter if whole else f"{self.kind.letter}{self.chunk}"


class Local(NamedTuple):
    """Times of the kernels around one chunk's experts, in one direction.

    Attributes:
        split: of the index of one chunk's rows, which forward makes for all chunks first.
        pack, sort, unsort, add: before S, after it, before R, and after that.
    """

    split: float = 0.0
    pack: float = 0.0
    sort: float = 0.0
    unsort: float = 0.0
    add: float = 0.0

    def plus(self, other: Local) -> Local:
        """Both, one after the other."""
        return Local(*(a + b for a, b in zip(self, other)))


class ChunkTimes(NamedTuple):
    """Times of the operations of one of n equal chunks, all in one unit.

    Attributes:
        send, back: the all-to-alls to and from the experts.
        experts: their forward pass.
        input_gradient, weight_gradient: their backward pass.
        all_weights: weight gradients of all chunks in one product.
        again: what ``s3`` and ``s4`` compute again.
        activation: of that, the activation function, which ``s0`` computes again.
        input_copy, inside_copy: to the host; of the experts' input, and of what lies inside them.
        input_load, inside_load: back.
        forward, backward: kernels around the experts.
        restore: of the kernels of ``backward``, what rows that are sent again add.
    """

    send: float
    back: float
    experts: float
    input_gradient: float
    weight_gradient: float
    all_weights: float
    again: float
    activation: float = 0.0
    input_copy: float = 0.0
    inside_copy: float = 0.0
    input_load: float = 0.0
    inside_load: float = 0.0
    forward: Local = Local()
    backward: Local = Local()
    restore: Local = Local()

    def scaled(self, factor: float) -> ChunkTimes:
        """In another unit."""
        scaled = [
            Local(*(factor * y for y in x)) if isinstance(x, Local) else factor * x for x in self
        ]
        return ChunkTimes(*scaled)  # type: ignore[arg-type]


# Gives the times of one chunk of a plan, which has ``plan.chunks`` equal ones.
Costs = Callable[[LayerPlan], ChunkTimes]


def _nothing(plan: LayerPlan) -> ChunkTimes:
    return ChunkTimes(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class GivenCosts:
    """Costs of a whole call that n chunks share evenly, and what each operation costs on top.

    Attributes:
        exchange: one all-to-all of the whole call.
        experts: their forward pass; each of both gradients takes as long.
        input, inside: copies of the experts' input, and of what lies inside, one way.
        again: what ``s3`` and ``s4`` compute again, where that is not half of ``experts``, as fc1
            is without a gate.
        latency: of a message, on top of its share of ``exchange``.
        launch: of packing, sorting, the experts and adding, on top of each.
        base: for what is None.
    """

    exchange: float | None = None
    experts: float | None = None
    input: float | None = None
    inside: float | None = None
    again: float | None = None
    latency: float = 0.0
    launch: float = 0.0
    base: Costs = _nothing

    def __call__(self, plan: LayerPlan) -> ChunkTimes:
        """Of one chunk."""
        times, again = self.base(plan), self.again
        if again is None and self.experts is not None:
            again = self.experts / 2
        fields = {
            **dict.fromkeys(("send", "back"), self.exchange),
            **dict.fromkeys(("experts", "input_gradient", "weight_gradient"), self.experts),
            "again": again,
            **dict.fromkeys(("input_copy", "input_load"), self.input),
            **dict.fromkeys(("inside_copy", "inside_load"), self.inside),
        }
        shares: dict[str, Any] = {k: x / plan.chunks for k, x in fields.items() if x is not None}
        if self.experts is not None:
            shares["all_weights"] = self.experts
        times = times._replace(**shares)
        more, around = self.launch, Local(0.0, self.launch, self.launch, 0.0, self.launch)
        return times._replace(
            send=times.send + self.latency,
            back=times.back + self.latency,
            experts=times.experts + more,
            input_gradient=times.input_gradient + more,
            weight_gradient=times.weight_gradient + more,
            all_weights=times.all_weights + more,
            again=times.again + more,
            forward=times.forward.plus(around),
            backward=times.backward.plus(around),
        )


def scaled(costs: Costs, factor: float) -> Costs:
    """The same costs in another unit."""
    return lambda plan: costs(plan).scaled(factor)


class _Issue:
    """Operations in the order of issue; those on compute wait for what they need by events."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._compute: tuple[int, ...] = ()

    def compute(self, kind: Kind, chunk: int, time: float, *after: int) -> int:
        """On the compute stream, which waits for ``after``."""
        number = self._add(Operation(kind, chunk, Stream.COMPUTE, time, after))
        self._compute = (number,)
        return number

    def behind_compute(self, kind: Kind, chunk: int, stream: Stream, time: float) -> int:
        """On another stream, which waits for all that compute has been given so far."""
        return self._add(Operation(kind, chunk, stream, time, self._compute))

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1


def forward(plan: LayerPlan, times: ChunkTimes) -> list[Operation]:
    """Operations of a forward pass, as ``moe.passes.Forward`` issues them."""
    issue, strategy, local = _Issue(), plan.strategy, times.forward
    sent, back, copied = dict[int, int](), dict[int, int](), dict[int, int]()
    inside = strategy.inside is Restore.OFFLOAD
    saved = times.input_copy * (strategy.input is Restore.OFFLOAD) + times.inside_copy * inside
    # How many chunks' copies may run before compute waits for the oldest.
    room = DEPTH if inside else plan.depth
    issue.compute(Kind.SPLIT, 0, plan.chunks * local.split)

    def save(i: int) -> None:
        if strategy in _COPYING:
            copied[i] = issue.behind_compute(Kind.SAVE, i, Stream.TO_HOST, saved)

    for step, i in plan.operations():
        if step is Step.DISPATCH:
            issue.compute(Kind.PACK, i, local.pack)
            sent[i] = issue.behind_compute(Kind.SEND, i, Stream.NETWORK, times.send)
        elif step is Step.COMPUTE:
            old = [copied[i - room]] if i - room in copied else []
            issue.compute(Kind.SORT, i, local.sort, sent[i], *old)
            if not inside:  # the input's copy runs beside the experts
                save(i)
            issue.compute(Kind.EXPERTS, i, times.experts + local.unsort)
            if inside:
                save(i)
            back[i] = issue.behind_compute(Kind.RETURN, i, Stream.NETWORK, times.back)
        elif step is Step.COLLECT:
            issue.compute(Kind.ADD, i, local.add, back[i])
    return issue.operations


_COPYING = (Strategy.S1, Strategy.S2, Strategy.S3)


def backward(plan: LayerPlan, times: ChunkTimes, *, split: bool = False) -> list[Operation]:
    """Operations of a backward pass, as ``moe.passes.Backward`` issues them: last chunk first.

    Args:
        split: weight gradients wait for W passes, where the experts' input is kept.
    """
    issue, strategy, local = _Issue(), plan.strategy, times.backward
    sent, back, loaded = dict[int, int](), dict[int, int](), dict[int, int]()
    resends = strategy.input is Restore.RESEND
    load = times.input_load * (strategy.input is Restore.OFFLOAD)
    load += times.inside_load * (strategy.inside is Restore.OFFLOAD)
    again = {Restore.RECOMPUTE: times.again, Restore.ACTIVATE: times.activation}
    experts = times.input_gradient + again.get(strategy.inside, 0.0)
    late = strategy.keeps_products and not plan.stock  # Megatron's own layer does both at once
    if not (late or (split and strategy.keeps_products)):
        experts += times.weight_gradient
    pack, sort = (x + resends * y for x, y in zip(local[1:3], times.restore[1:3]))
    for step, position in plan.operations():
        i = plan.chunks - 1 - position
        if step is Step.FETCH and strategy in _COPYING:
            loaded[i] = issue.behind_compute(Kind.LOAD, i, Stream.TO_DEVICE, load)
        elif step is Step.DISPATCH:
            issue.compute(Kind.PACK, i, pack)
            message = times.back + resends * times.send
            sent[i] = issue.behind_compute(Kind.SEND, i, Stream.NETWORK, message)
        elif step is Step.COMPUTE:
            issue.compute(Kind.SORT, i, sort, sent[i])
            arrived = [loaded[i]] if i in loaded else []
            issue.compute(Kind.EXPERTS, i, experts + local.unsort, *arrived)
            back[i] = issue.behind_compute(Kind.RETURN, i, Stream.NETWORK, times.send)
        elif step is Step.WEIGHTS and late and not split:
            issue.compute(Kind.WEIGHTS, 0, times.all_weights)
        elif step is Step.COLLECT:
            issue.compute(Kind.ADD, i, local.add, back[i])
    return issue.operations


@dataclass(frozen=True)
class StreamRun:
    """One simulated pass.

    Attributes:
        operations: in the order of issue.
        start, end: of each, from the pass's start.
    """

    operations: tuple[Operation, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the first start to when the result is there: copies to the host may end later."""
        ends = (e for o, e in zip(self.operations, self.end) if o.stream is not Stream.TO_HOST)
        return max(ends, default=0.0)

    def busy(self, stream: Stream) -> float:
        """The time that a stream works."""
        return sum(one.time for one in self.operations if one.stream is stream)

    def on(self, stream: Stream) -> Iterator[tuple[Operation, float, float]]:
        """The operations of one stream with start and end; those that take no time left out."""
        for one, start, end in zip(self.operations, self.start, self.end):
            if one.stream is stream and one.time > 0:
                yield one, start, end


def simulate_streams(operations: Sequence[Operation], *, one_queue: bool = False) -> StreamRun:
    """Start and end of every operation.

    Args:
        operations: in the order of issue.
        one_queue: the device has one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``): none
            starts before the one that was issued before it has started, whatever its stream.
    """
    free = dict.fromkeys(Stream, 0.0)
    starts, ends, before = list[float](), list[float](), 0.0
    for one in operations:
        begin = max([free[one.stream], before * one_queue, *(ends[k] for k in one.after)])
        before = begin
        starts.append(begin)
        ends.append(begin + one.time)
        free[one.stream] = ends[-1]
    return StreamRun(tuple(operations), tuple(starts), tuple(ends))


@dataclass(frozen=True)
class LayerRun:
    """One call of a layer by prediction, in the unit of the costs.

    Attributes:
        forward, backward: its passes.
        weights: of W passes, where weight gradients wait for them; 0: they are part of backward.
    """

    plan: LayerPlan
    forward: StreamRun
    backward: StreamRun
    weights: float = 0.0

    @property
    def time(self) -> float:
        """Forward, backward and W, one after the other."""
        return self.forward.makespan + self.backward.makespan + self.weights


def run_layer(
    plan: LayerPlan, costs: Costs, *, split: bool = False, one_queue: bool = False
) -> LayerRun:
    """Simulate one call; arguments as of ``backward`` and ``simulate_streams``."""
    times = costs(plan)
    waits = split and plan.strategy.keeps_products
    return LayerRun(
        plan,
        simulate_streams(forward(plan, times), one_queue=one_queue),
        simulate_streams(backward(plan, times, split=waits), one_queue=one_queue),
        times.all_weights * waits,
    )
