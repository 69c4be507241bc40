"""The event loop: the times of everything that executes a fixed order of actions on every rank.

A *slot* holds when one result is there: of a pass, a copy, or whatever else a rank may wait for.
Every rank works through its list: an action starts when the rank is free and the slots that it
needs are filled, and fills its own at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .actions import OFFLOAD_OPS, Action, AnyAction, Op, Operation
from .costs import Durations
from .effects import KINDS, results, share_of
from .placement import Placement
from .tasks import sources
from .units import UnitCosts
from .vocabulary import Vocabulary, VocabularyOp


class Lane(NamedTuple):
    """All actions of one kind: those of microbatch j use the slots given here plus j.

    Attributes:
        took: duration.
        needs: (slot, latency) of every input.
        gives: slots of the results, at least one.
        copy: of an OFFLOAD or RELOAD: the slot of its copy's end.
    """

    took: int
    needs: Sequence[tuple[int, int]]
    gives: Sequence[int]
    copy: int | None = None


Node = tuple[Lane, int]  # one action: its lane, and its microbatch
Row = list[Node]


class CopyQueue(Protocol):
    """Copies beside the ranks' computation."""

    def ask(self, rank: int, slot: int, time: int) -> int:
        """``rank`` asks at ``time`` for the copy whose end is ``slot``: when it has ended."""


class Run(NamedTuple):
    """The state of a run.

    Attributes:
        ends: by slot, when it was filled; less than 0 if it never was.
        clock: per rank, the end of its last action.
        at: per rank, the position of the action that it could not run; the length if it has ended.
    """

    ends: list[int]
    clock: list[int]
    at: list[int]


class RepeatedError(Exception):
    """A slot is filled twice: arguments are the rank and the position of the second action."""


def run(
    rows: Sequence[Row],
    slots: int,
    *,
    copies: CopyQueue | None = None,
) -> Run:
    """Execute ``rows``, every action as early as the order and its inputs allow.

    A rank runs until it lacks an input; the rank that fills that slot wakes it.

    Args:
        rows: of every rank.
        slots: how many slots there are.
        copies: takes the copies that actions ask for.

    Returns:
        What has run; where ranks wait for each other that is not all.

    Raises:
        RepeatedError: an action is there twice.
    """
    # A slot that is waited for holds the complement of the rank, an empty one that of no rank.
    ends = [empty := ~len(rows)] * slots
    clock, at = [0] * len(rows), [0] * len(rows)
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row, time = rows[rank], clock[rank]
        for position in range(at[rank], len(row)):
            (took, needs, gives, copied), j = row[position]
            start, missing = time, -1
            for slot, latency in needs:
                end = ends[slot + j]
                if end < 0:
                    missing = slot + j
                    break
                if end + latency > start:
                    start = end + latency
            if missing >= 0:
                ends[missing] = ~rank
                clock[rank], at[rank] = time, position
                break
            time = start + took
            for slot in gives:
                waiter = ends[slot + j]
                ends[slot + j] = time
                if waiter != empty:
                    if waiter >= 0:
                        raise RepeatedError(rank, position)
                    awake.append(~waiter)
            if copied is not None and copies is not None:
                ends[copied + j] = copies.ask(rank, copied + j, time)
        else:
            clock[rank], at[rank] = time, len(row)
    return Run(ends, clock, at)


# Kinds of slots: of results, when an offload action was reached, what collectives bring to each
# pass that waits for it, and when a copy has ended.
KIND: dict[Operation, int] = {
    op: i for i, op in enumerate((*KINDS, *sorted(OFFLOAD_OPS), *VocabularyOp))
}
_COPIED: dict[Operation, int] = {Op.OFFLOAD: len(KIND), Op.RELOAD: len(KIND) + 1}
SLOT_KINDS = len(KIND) + len(_COPIED)


class _Lanes(dict[tuple[Operation, int], Lane]):
    """The lanes of a program, each made when it is first looked up."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __missing__(self, key: tuple[Operation, int]) -> Lane:
        lane = self[key] = self._program.lane(*key)
        return lane


class _Nodes(dict[tuple[Operation, int], Row]):
    """Their nodes, by microbatch."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __missing__(self, key: tuple[Operation, int]) -> Row:
        lane = self._program.lanes[key]
        units = self._program.units
        if units is None:
            row = self[key] = [(lane, j) for j in range(self._program.microbatches)]
            return row
        of = self._program.durations.of
        op, stage = key
        parts = results(op)  # a whole pass is the sum of its halves, whose factors differ
        took = [sum(of(part, stage) * share_of(part, unit) for part in parts) for unit in units]
        row = self[key] = [(lane._replace(took=took[j]), j) for j, _ in enumerate(units)]
        return row


class Program:
    """Slots and lanes of one pipeline; every slot number is kind * stages * microbatches + ...

    Args:
        placement: rank and chunk of every stage.
        durations: of the passes and hops.
        microbatches: more than any action's microbatch.
        vocabulary: passes of a sharded one; None: it is not sharded.
        units: of every unit what it takes of the durations; None: all of them.

    Attributes:
        lanes, nodes: of compute actions, by operation and stage.
    """

    def __init__(
        self,
        placement: Placement,
        durations: Durations,
        microbatches: int,
        vocabulary: Vocabulary | None = None,
        units: Sequence[UnitCosts] | None = None,
    ) -> None:
        self.units = units
        self.placement, self.durations, self.microbatches = placement, durations, microbatches
        self.vocabulary = vocabulary
        self._kind = placement.num_stages * microbatches
        self.lanes, self.nodes = _Lanes(self), _Nodes(self)

    @property
    def pass_slots(self) -> int:
        """Slots of passes, which come first; with a sharded vocabulary all slots."""
        return self.slots if self.vocabulary else len(KINDS) * self._kind

    @property
    def slots(self) -> int:
        """Slots of passes, offload actions and copies; others may come after them."""
        return SLOT_KINDS * self._kind

    def slot(self, kind: int, stage: int, microbatch: int = 0) -> int:
        """The slot of one result."""
        return kind * self._kind + stage * self.microbatches + microbatch

    def copy_of(self, slot: int) -> Action:
        """The OFFLOAD or RELOAD whose copy's end is ``slot``."""
        kind, rest = divmod(slot, self._kind)
        op = next(op for op, number in _COPIED.items() if number == kind)
        return Action(op, *divmod(rest, self.microbatches))

    def lane(self, op: Operation, stage: int) -> Lane:
        """The lane of a compute action."""
        last = sources(op, stage, self.placement, self.durations)[-1:]
        needs = [(self.slot(KIND[kind], other), lag) for kind, other, lag in last]
        gives = [self.slot(KIND[kind], stage) for kind in results(op)]
        if self.vocabulary is not None:
            collective = self.vocabulary.before(op, stage)
            if collective is not None:
                needs.append((self.slot(KIND[collective], stage), self.durations.collective))
            for shared in self.vocabulary.behind(op, stage):
                gives += self._arrived(shared) if len(self.vocabulary.sources[shared]) == 1 else []
        return Lane(self.durations.of(op, stage), needs, gives)

    def _arrived(self, collective: VocabularyOp) -> list[int]:
        assert self.vocabulary is not None
        return [self.slot(KIND[collective], s) for _, s in self.vocabulary.waiters[collective]]

    def collectives(self) -> list[Row]:
        """What runs beside the ranks: a row for each collective that several passes feed, by
        microbatch, or for each unit, whose order may be any. One that a single pass feeds is a
        result of that pass."""
        if self.vocabulary is None:
            return []
        rows = []
        for one, carried in self.vocabulary.sources.items():
            if len(carried) == 1:
                continue
            needs = [(self.slot(KIND[kind], stage), 0) for kind, stage in carried]
            lane = Lane(0, needs, self._arrived(one))
            nodes = [(lane, j) for j in range(self.microbatches)]
            rows += [nodes] if self.units is None else [[node] for node in nodes]
        return rows

    def row(self, actions: Iterable[AnyAction]) -> Row:
        """Nodes of compute actions."""
        nodes, row = self.nodes, []
        for action in actions:
            if type(action) is Action:
                op, stage, microbatch = action
                row.append(nodes[op, stage][microbatch])
            else:
                row.append((self._joint(action.parts), 0))
        return row

    def _joint(self, parts: Sequence[Action]) -> Lane:
        """Runs when the inputs of all parts are there."""
        lanes = [(self.lanes[part.op, part.stage], part.microbatch) for part in parts]
        return Lane(
            self.durations.joint([(part.op, part.stage) for part in parts]),
            [(slot + j, latency) for lane, j in lanes for slot, latency in lane.needs],
            [slot + j for lane, j in lanes for slot in lane.gives],
        )

    def row_with_copies(self, actions: Sequence[AnyAction]) -> Row:
        """Nodes of compute and offload actions.

        Raises:
            ValueError: a RELEASE whose OFFLOAD does not stand before it.
        """
        row: Row = []
        asked: set[Action] = set()
        for action in actions:
            if not action.is_copy:
                ((lane, j),) = self.row([action])
                for part in action.parts:
                    reload = Action(Op.RELOAD, part.stage, part.microbatch)
                    if part.op in (Op.B, Op.BW) and reload in asked:
                        h2d = self.slot(_COPIED[Op.RELOAD], part.stage, part.microbatch)
                        needs = (*lane.needs, (h2d - j, 0))
                        lane = lane._replace(needs=needs)
                row.append((lane, j))
                continue
            assert isinstance(action, Action)
            op, stage, j = action
            copy: int | None = None
            waits: tuple[tuple[int, int], ...] = ()
            if op in _COPIED:
                asked.add(action)
                copy = self.slot(_COPIED[op], stage)
            elif op is Op.RELEASE:
                offload = Action(Op.OFFLOAD, stage, j)
                if offload not in asked:
                    raise ValueError(f"{action} stands before {offload} or without it")
                waits = ((self.slot(_COPIED[Op.OFFLOAD], stage), 0),)
            row.append((Lane(0, waits, (self.slot(KIND[op], stage),), copy), j))
        return row
