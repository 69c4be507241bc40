"""Effects of an operation: its inputs, its results, and the activation sets it keeps or frees.

Whatever counts memory over time is a running sum of signed steps (``peak``, ``curve``): of sets as
in the tables here, or of bytes, with the weights of the one who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from .actions import Action, AnyAction, Op, Operation
from .units import UnitCosts

KINDS = (Op.F, Op.B, Op.W)  # of results of a stage's passes; a BW has two
# Messages that carry a result to another rank.
MESSAGES: dict[Operation, tuple[Op, Op]] = {
    Op.F: (Op.SEND_F, Op.RECV_F),
    Op.B: (Op.SEND_B, Op.RECV_B),
}
CARRIED: dict[Operation, Operation] = {op: kind for kind, ops in MESSAGES.items() for op in ops}

# Change of the number of activation sets on the device: a growth as the action starts, a decrease
# as it ends. A set lives from its F to its W (or BW), less the time between RELEASE and PREPARE.
DEVICE: dict[Operation, int] = {Op.F: 1, Op.W: -1, Op.BW: -1, Op.RELEASE: -1, Op.PREPARE: 1}
# The same on the host, for sets that are offloaded.
HOST: dict[Operation, int] = {Op.OFFLOAD: 1, Op.B: -1, Op.BW: -1}
FREES = frozenset({Op.W, Op.BW})

Table = Mapping[Operation, int]
Time = TypeVar("Time", int, float)


def results(op: Operation) -> tuple[Operation, ...]:
    """Kinds of results of a compute action, of its stage and microbatch."""
    return (Op.B, Op.W) if op is Op.BW else (op,)


def inputs(op: Operation, stage: int, num_stages: int) -> tuple[tuple[Op, int], ...]:
    """(kind, stage) of every result that a pass needs, same microbatch; what comes last is last.

    The own F of a B has ended if the next stage's B has. Vocabulary passes need none of these.
    """
    if op is Op.F:
        return ((Op.F, stage - 1),) if stage else ()
    if op is Op.W:
        return ((Op.B, stage),)
    if op not in (Op.B, Op.BW):
        return ()
    own = ((Op.F, stage),)
    return (*own, (Op.B, stage + 1)) if stage + 1 < num_stages else own


@lru_cache(maxsize=8)
def _users(num_stages: int) -> dict[tuple[Operation, int], list[tuple[Op, int]]]:
    found: dict[tuple[Operation, int], list[tuple[Op, int]]] = {}
    for op in KINDS:
        for stage in range(num_stages):
            for needed in inputs(op, stage, num_stages):
                found.setdefault(needed, []).append((op, stage))
    return found


def users(kind: Operation, stage: int, num_stages: int) -> Sequence[tuple[Op, int]]:
    """The reverse of ``inputs``: (kind of its result, stage) of every pass that needs a result."""
    return _users(num_stages).get((kind, stage), ())


def given(action: AnyAction) -> Iterator[Action]:
    """The results of a compute action: kind, stage and microbatch of each."""
    for op, stage, microbatch in action.parts:
        for kind in results(op):
            yield Action(kind, stage, microbatch)


def beside(op: Operation, unit: int) -> int | None:
    """The unit whose pass of the same op and stage a pass needs, if both are of one microbatch.

    F needs the keys and values of the slice before, B their gradients from the slice behind.
    """
    if op is Op.F:
        return unit - 1
    return unit + 1 if op in (Op.B, Op.BW) else None


def passes(row: Iterable[AnyAction]) -> Iterator[Action]:
    """A rank's actions with the two passes of a joint action one after the other."""
    for action in row:
        if type(action) is Action:
            yield action
        else:
            yield from action.parts


def step(action: Action, sizes: Sequence[UnitCosts] | None = None, table: Table = DEVICE) -> int:
    """What a pass or copy takes of its rank's memory, or less than 0 if it frees some.

    Args:
        action: not a joint one.
        sizes: of all units' sets; None: all are 1.
        table: what an operation takes of a set of 1.
    """
    change = table.get(action[0], 0)
    if sizes is None or not change:
        return change
    unit = sizes[action[2]]
    return change * (unit.size if change > 0 else unit.freed)


def steps(
    row: Iterable[AnyAction], table: Table = DEVICE, sizes: Sequence[UnitCosts] | None = None
) -> Iterator[int]:
    """``step`` of every pass and copy of a rank."""
    if sizes is not None:
        yield from (step(action, sizes, table) for action in passes(row))
        return
    get = table.get
    for action in row:
        if type(action) is Action:
            yield get(action[0], 0)
        else:
            yield from (get(part[0], 0) for part in action.parts)


def share_of(op: Operation, unit: UnitCosts) -> int:
    """What a pass of a unit takes of its duration: that of a sharded vocabulary by its tokens."""
    return unit[KINDS.index(op)] if op in KINDS else unit.size


def peak(changes: Iterable[int]) -> int:
    """Largest value of a running sum, its start at 0 included."""
    return max(accumulate(changes, initial=0))


def peak_sets(
    ranks: Sequence[Sequence[AnyAction]], sizes: Sequence[UnitCosts] | None = None
) -> list[int]:
    """Most activation sets resident at once on each rank; depends on the order only.

    0 everywhere if no rank has a backward action: a forward-only schedule keeps no sets.

    Args:
        sizes: of the units' sets; None: a set is 1.
    """
    if not any(action.op in FREES for row in ranks for action in passes(row)):
        return [0] * len(ranks)
    return [peak(steps(row, DEVICE, sizes)) for row in ranks]


def peak_host_sets(
    ranks: Sequence[Sequence[AnyAction]], sizes: Sequence[UnitCosts] | None = None
) -> list[int]:
    """Most sets with a copy on the host at once on each rank; depends on the order only.

    A host copy is there from its OFFLOAD to its B (or BW), which waits for the copy back.

    Args:
        sizes: as ``peak_sets``.
    """
    peaks = []
    for row in ranks:
        offloaded = {a[1:] for a in passes(row) if a.op is Op.OFFLOAD}
        peaks.append(peak(steps((a for a in passes(row) if a[1:] in offloaded), HOST, sizes)))
    return peaks


def curve(timed: Iterable[tuple[Time, int]]) -> list[tuple[Time, int]]:
    """Running sum over time: (time, value from then on), times increasing.

    Args:
        timed: (time, change), by time. What changes at one moment is one step of the curve: a rank
            frees before it allocates.
    """
    found: list[tuple[Time, int]] = [(0, 0)]
    for time, change in timed:
        value = found[-1][1] + change
        if found[-1][0] == time:
            found[-1] = (time, value)
        else:
            found.append((time, value))
    return found
