"""One table of an iteration's passes: what each waits for, how long it takes, what it holds.

Needs between stages are those of ``effects.inputs``; slices add needs within a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from .actions import Action, Op, Operation
from .costs import Durations
from .effects import DEVICE, beside, inputs, share_of
from .placement import Placement
from .units import UnitCosts, falls
from .vocabulary import Vocabulary


def sources(
    op: Operation,
    stage: int,
    placement: Placement,
    durations: Durations,
    vocabulary: Vocabulary | None = None,
) -> list[tuple[Operation, int, int]]:
    """(kind, stage, lag) of every result that a pass needs, of the same unit.

    The lag is from the end of the pass that gives it: a hop if that is another rank's, or the
    latency of the collective that brings it.
    """
    rank_of, hop = placement.rank_of, durations.hop
    found: list[tuple[Operation, int, int]] = [
        (kind, other, hop if rank_of(other) != rank_of(stage) else 0)
        for kind, other in inputs(op, stage, placement.num_stages)
    ]
    collective = None if vocabulary is None else vocabulary.before(op, stage)
    if vocabulary is not None and collective is not None:
        carried = vocabulary.sources[collective]
        found += [(kind, other, durations.collective) for kind, other in carried]
    return found


Edges = tuple[tuple[int, int], ...]  # (step to another task's number, lag)


class _Rest(NamedTuple):
    """What else a table is made from."""

    durations: Durations
    fused: Collection[int]
    vocabulary: Vocabulary | None


class Tasks:
    """All passes of one iteration, by number; those of an operation and stage are a *lane*.

    Args:
        placement: rank and chunk of every stage.
        durations: of the passes of a unit with factors 1, of a hop, and of a collective.
        microbatches: of each its units, in the order of its tokens; a number: so many whole ones.
        fused: stages whose B and W are one pass, BW.
        vocabulary: passes of a sharded one; None: it is not sharded.

    Attributes:
        microbatch: of every unit.
        lanes: (operation, stage).
        rank, lane, duration, take, give: by task. A lane's tasks run in the order of
            ``lane_order``; ``take`` is what its start takes of its rank's memory, ``give`` what its
            end gives back.
        needs: by task, (step, lag): it may start ``lag`` after the end of the task whose number is
            larger by ``step``.
        feeds: the same the other way round.
    """

    def __init__(
        self,
        placement: Placement,
        durations: Durations,
        microbatches: int | Sequence[Sequence[UnitCosts]],
        *,
        fused: Collection[int] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if isinstance(microbatches, int):
            microbatches = [[UnitCosts()]] * microbatches
        self.placement, self._rest = placement, _Rest(durations, fused, vocabulary)
        units = [unit for one in microbatches for unit in one]
        self.microbatch = [j for j, one in enumerate(microbatches) for _ in one]
        self.lanes = list(self._lanes())
        self._numbers = {name: k * len(units) for k, name in enumerate(self.lanes)}
        self.lane = [k for k, _ in enumerate(self.lanes) for _ in units]
        self.rank = [placement.rank_of(self.lanes[lane][1]) for lane in self.lane]
        sizes, nothing = [unit.size for unit in units], [0] * len(units)
        freed = [unit.freed for unit in units]
        self.duration, self.take, self.give = list[int](), list[int](), list[int]()
        for op, stage in self.lanes:
            self.duration += self._times(op, stage, units)
            change = DEVICE.get(op, 0)
            self.take += sizes if change > 0 else nothing
            self.give += freed if change < 0 else nothing
        # (lane, lag) of what the tasks of a lane need of the same unit, and the same reversed.
        needed = [list(self._sources(lane)) for lane in range(len(self.lanes))]
        users: list[list[tuple[int, int]]] = [[] for _ in needed]
        for lane, edges in enumerate(needed):
            for other, lag in edges:
                users[other].append((lane, lag))
        self.needs, self.feeds = self._edges(needed), self._edges(users)
        self._add_slices()

    def _lanes(self) -> Iterator[tuple[Operation, int]]:
        stages = range(self.placement.num_stages)
        yield from ((Op.F, stage) for stage in stages)
        yield from ((Op.BW if stage in self._rest.fused else Op.B, stage) for stage in stages)
        yield from ((Op.W, stage) for stage in stages if stage not in self._rest.fused)
        if self._rest.vocabulary is not None:
            for op in self._rest.vocabulary.passes:
                yield from ((op, stage) for stage in self._rest.vocabulary.stages)

    def _times(self, op: Operation, stage: int, units: Sequence[UnitCosts]) -> Iterator[int]:
        if op is Op.BW:
            parts = (self._times(part, stage, units) for part in (Op.B, Op.W))
            return map(int.__add__, *parts)
        whole = self._rest.durations.of(op, stage)
        return (whole * share_of(op, unit) for unit in units)

    @property
    def units(self) -> int:
        """How many."""
        return len(self.microbatch)

    @property
    def is_cut(self) -> bool:
        """True if some microbatch has several units."""
        return self.microbatch[-1] + 1 < self.units

    def number(self, op: Operation, stage: int, unit: int) -> int:
        """Of one pass; of a BW also by its B or W."""
        if stage in self._rest.fused and op in (Op.B, Op.W):
            op = Op.BW
        return self._numbers[op, stage] + unit

    def name(self, task: int) -> tuple[Operation, int, int]:
        """(operation, stage, unit)."""
        lane, unit = divmod(task, self.units)
        return (*self.lanes[lane], unit)

    def _sources(self, lane: int) -> Iterator[tuple[int, int]]:
        op, stage = self.lanes[lane]
        durations, _, vocabulary = self._rest
        for kind, other, lag in sources(op, stage, self.placement, durations, vocabulary):
            yield self.number(kind, other, 0) // self.units, lag

    def _edges(self, lanes: Sequence[Sequence[tuple[int, int]]]) -> list[Edges]:
        """Of every task, to those of these lanes with the same unit; one object for a lane."""
        found: list[Edges] = []
        for lane, edges in enumerate(lanes):
            found += [tuple(((k - lane) * self.units, lag) for k, lag in edges)] * self.units
        return found

    def _add_slices(self) -> None:
        """What units of one microbatch need of each other."""
        units, microbatch = self.units, self.microbatch
        for lane, (op, _) in enumerate(self.lanes if self.is_cut else ()):
            for unit in range(units):
                before = beside(op, unit)
                if before is None:
                    break
                if 0 <= before < units and microbatch[before] == microbatch[unit]:
                    task, step = lane * units + unit, before - unit
                    self.needs[task] = (*self.needs[task], (step, 0))
                    self.feeds[task + step] = (*self.feeds[task + step], (-step, 0))

    def lane_order(self, lane: int) -> list[int]:
        """Its tasks: microbatches rise; the units of one fall in backward passes."""
        order, first = list(range(lane * self.units, (lane + 1) * self.units)), lane * self.units
        if self.is_cut and falls(self.lanes[lane][0]):
            order.sort(key=lambda task: (self.microbatch[task - first], -task))
        return order

    def rows(self, orders: Iterable[Iterable[Action]]) -> list[list[int]]:
        """Tasks of every rank's actions, whose microbatches are units."""
        numbers = self._numbers
        return [[numbers[op, stage] + unit for op, stage, unit in row] for row in orders]

    def actions(self, rows: Sequence[Sequence[int]]) -> list[list[Action]]:
        """The reverse of ``rows``."""
        lanes, units = self.lanes, self.units
        return [[Action(*lanes[task // units], task % units) for task in row] for row in rows]

    def backward(self) -> Tasks:
        """The same in reversed time: what was needed is fed, what was given back is taken."""
        other = copy.copy(self)
        other.needs, other.feeds = self.feeds, self.needs
        other.take, other.give = self.give, self.take
        return other

    def peaks(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The most that each rank holds at once."""
        take, net = self.take, list(map(int.__sub__, self.take, self.give))
        return [
            # Before a task, and while it runs.
            max(
                map(
                    add,
                    accumulate([net[task] for task in row], initial=0),
                    map(take.__getitem__, row),
                ),
                default=0,
            )
            for row in rows
        ]

    def fits(self, rows: Sequence[Sequence[int]], caps: Sequence[int]) -> bool:
        """True if no rank ever holds more than its cap."""
        return all(map(int.__le__, self.peaks(rows), caps))
