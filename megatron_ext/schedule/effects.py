"""Effects of an operation: its inputs, its results, and the activation sets it keeps or frees.

Whatever counts memory over time is a running sum of signed steps (``peak``, ``curve``): of sets as
in the tables here, or of bytes, with the weights of the one who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from .actions import Action, AnyAction, Op, Operation

# Kinds of results.
F, B, W = range(3)
KINDS = (Op.F, Op.B, Op.W)
_RESULTS = {Op.F: (F,), Op.B: (B,), Op.W: (W,), Op.BW: (B, W)}

# Change of the number of activation sets on the device: a growth as the action starts, a decrease
# as it ends. A set lives from its F to its W (or BW), less the time between RELEASE and PREPARE.
DEVICE: dict[Operation, int] = {Op.F: 1, Op.W: -1, Op.BW: -1, Op.RELEASE: -1, Op.PREPARE: 1}
# The same on the host, for sets that are offloaded.
HOST: dict[Operation, int] = {Op.OFFLOAD: 1, Op.B: -1, Op.BW: -1}
# Microbatches between their forward and their backward pass, wherever their sets are.
CALLS: dict[Operation, int] = {Op.F: 1, Op.B: -1, Op.BW: -1}
FREES = frozenset({Op.W, Op.BW})

Time = TypeVar("Time", int, float)


def results(op: Operation) -> tuple[int, ...]:
    """Kinds of results of a compute action, of its stage and microbatch."""
    return _RESULTS[op]  # type: ignore[index]


def inputs(op: Operation, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """(kind, stage) of every result that a compute action needs, same microbatch."""
    if op is Op.F:
        return ((F, stage - 1),) if stage else ()
    if op is Op.W:
        return ((B, stage),)
    return ((F, stage), (B, stage + 1)) if stage + 1 < num_stages else ((F, stage),)


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


def steps(row: Iterable[AnyAction], table: dict[Operation, int] = DEVICE) -> Iterator[int]:
    """Change of the number of sets by every pass and copy of a rank, 0 where there is none."""
    get = table.get
    for action in row:
        if type(action) is Action:
            yield get(action[0], 0)
        else:
            yield from (get(part[0], 0) for part in action.parts)


def peak(changes: Iterable[int], start: int = 0) -> int:
    """Largest value of a running sum, its start included."""
    return max(accumulate(changes, initial=start))


def peak_sets(ranks: Sequence[Sequence[AnyAction]]) -> list[int]:
    """Most activation sets resident at once on each rank; depends on the order only.

    0 everywhere if no rank has a backward action: a forward-only schedule keeps no sets.
    """
    if not any(action.op in FREES for row in ranks for action in passes(row)):
        return [0] * len(ranks)
    return [peak(steps(row)) for row in ranks]


def peak_calls(ranks: Sequence[Sequence[AnyAction]]) -> list[int]:
    """Most passes of each rank whose B (or BW) has not run, wherever their sets are."""
    return [peak(steps(row, CALLS)) for row in ranks]


def peak_host_sets(ranks: Sequence[Sequence[AnyAction]]) -> list[int]:
    """Most sets with a copy on the host at once on each rank; depends on the order only.

    A host copy is there from its OFFLOAD to its B (or BW), which waits for the copy back.
    """
    peaks = []
    for row in ranks:
        offloaded = {a[1:] for a in passes(row) if a.op is Op.OFFLOAD}
        peaks.append(peak(steps((a for a in passes(row) if a[1:] in offloaded), HOST)))
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
