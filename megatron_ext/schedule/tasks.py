"""One table of an iteration's passes: what each waits for, how long it takes, what it holds.

A *unit* is one slice of one microbatch; without slices it is a microbatch. Units are numbered
through: those of microbatch 0 in the order of its tokens, then those of microbatch 1. Needs between
stages are those of ``effects.inputs``; between slices those of ``effects.beside``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .actions import Action, Op
from .costs import Durations
from .effects import KINDS, beside, inputs, peak
from .placement import Placement


class UnitCosts(NamedTuple):
    """Of one unit, as shares of a whole microbatch's.

    Attributes:
        forward, backward_input, backward_weight: factors of the passes' durations, integers.
        size: of its activation set, an integer in the unit of the caps.
    """

    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1
    size: int = 1


class Tasks:
    """All F, B and W of one iteration, by number.

    Args:
        placement: rank and chunk of every stage.
        durations: of the passes of a unit with factors 1, and of a hop.
        microbatches: of each its units, in the order of its tokens; a number: so many whole ones.

    Attributes:
        microbatch: of every unit.
        rank, lane, duration, take, give: by task. A lane's tasks run in the order of
            ``lane_order``; ``take`` is what its start takes of its rank's memory, ``give`` what its
            end gives back.
        needs: by task, (other task, lag): it may start ``lag`` after the end of the other.
        feeds: the same the other way round.
    """

    def __init__(
        self,
        placement: Placement,
        durations: Durations,
        microbatches: int | Sequence[Sequence[UnitCosts]],
    ) -> None:
        if isinstance(microbatches, int):
            microbatches = [[UnitCosts()]] * microbatches
        self.placement, self._hop = placement, durations.hop
        units = [unit for one in microbatches for unit in one]
        self.microbatch = [j for j, one in enumerate(microbatches) for _ in one]
        self.rank = [
            r for _ in KINDS for r in map(placement.rank_of, range(self.stages)) for _ in units
        ]
        self.lane = [i // self.units for i in range(len(self.rank))]
        rows = (durations.forward, durations.backward_input, durations.backward_weight)
        self.duration = [
            row[s] * u[k] for k, row in enumerate(rows) for s in range(self.stages) for u in units
        ]
        sizes = [unit.size for unit in units]
        nothing = [0] * (self.stages * self.units)
        self.take = sizes * self.stages + nothing * 2
        self.give = nothing * 2 + sizes * self.stages
        self.needs = [tuple(self._needs(task)) for task in range(len(self.rank))]
        feeds: list[list[tuple[int, int]]] = [[] for _ in self.rank]
        for task, edges in enumerate(self.needs):
            for other, lag in edges:
                feeds[other].append((task, lag))
        self.feeds = [tuple(edges) for edges in feeds]

    @property
    def units(self) -> int:
        """How many."""
        return len(self.microbatch)

    @property
    def stages(self) -> int:
        """How many."""
        return self.placement.num_stages

    def number(self, op: Op, stage: int, unit: int) -> int:
        """Of one pass."""
        return (KINDS.index(op) * self.stages + stage) * self.units + unit

    def name(self, task: int) -> tuple[Op, int, int]:
        """(op, stage, unit)."""
        lane, unit = divmod(task, self.units)
        return (KINDS[lane // self.stages], lane % self.stages, unit)

    def _needs(self, task: int) -> Iterator[tuple[int, int]]:
        op, stage, unit = self.name(task)
        for kind, other in inputs(op, stage, self.stages):
            yield self.number(KINDS[kind], other, unit), self._lag(stage, other)
        near = beside(op, unit)
        if near is None or not 0 <= near < self.units:
            return
        if self.microbatch[near] == self.microbatch[unit]:
            yield self.number(op, stage, near), 0

    def _lag(self, stage: int, other: int) -> int:
        same = self.placement.rank_of(stage) == self.placement.rank_of(other)
        return 0 if same else self._hop

    def lane_order(self, lane: int) -> list[int]:
        """Its tasks: microbatches rise; the units of one rise in F, and fall in B and W."""
        sign = 1 if lane < self.stages else -1
        order = sorted(range(self.units), key=lambda unit: (self.microbatch[unit], sign * unit))
        return [lane * self.units + unit for unit in order]

    def rows(self, orders: Sequence[Sequence[Action]]) -> list[list[int]]:
        """Tasks of every rank's actions, whose microbatches are units; no BW."""
        return [[self.number(a.op, a.stage, a.microbatch) for a in row] for row in orders]  # type: ignore[arg-type]

    def actions(self, rows: Sequence[Sequence[int]]) -> list[list[Action]]:
        """The reverse of ``rows``."""
        return [[Action(*self.name(task)) for task in row] for row in rows]

    def backward(self) -> Tasks:
        """The same in reversed time: what was needed is fed, what was given back is taken."""
        other = copy.copy(self)
        other.needs, other.feeds = self.feeds, self.needs
        other.take, other.give = self.give, self.take
        return other

    def peaks(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The most that each rank holds at once."""
        return [
            peak(x for task in row for x in (self.take[task], -self.give[task])) for row in rows
        ]
